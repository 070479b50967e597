"""How long does orthogonalization take on this GPU, shape by shape?"""
