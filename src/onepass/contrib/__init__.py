"""Functions with the signatures of other libraries: `pyg` has PyTorch Geometric's softmax, `dgl` DGL's edge_softmax.

Neither module imports the library that it is named after.
"""
