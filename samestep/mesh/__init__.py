"""Meshes with named axes of ranks, and checks that models fit them."""

from samestep.mesh.build import Mesh, build
from samestep.mesh.degrees import AXES, Degrees, DegreesError
from samestep.mesh.spmd import SpmdMesh, SpmdMeshError, build_spmd

__all__ = [
    "AXES",
    "Degrees",
    "DegreesError",
    "Mesh",
    "SpmdMesh",
    "SpmdMeshError",
    "build",
    "build_spmd",
]
