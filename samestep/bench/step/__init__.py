"""How long does an optimizer step take on this GPU, and how long must it take?"""
