"""Boxes, blocks and owners as pure data: testable with no process group and no tensor."""
