"""Degrees that fit a world."""

from hypothesis import strategies as st

from samestep.mesh import Degrees

SIZES = st.sampled_from([1, 1, 2, 3, 4])


@st.composite
def degrees(draw):
    """Any degrees of up to 4 ranks per axis."""
    pp, replicate, data, ep, tp = (draw(SIZES) for _ in range(5))
    return Degrees(
        pp * replicate * data * ep * tp,
        pp,
        replicate,
        ep,
        tp,
        sequence_parallel=tp > 1 and draw(st.booleans()),
        expert_tensor_parallel=draw(st.sampled_from([0, 1, tp])),
        ep_carries_data=draw(st.booleans()),
    )
