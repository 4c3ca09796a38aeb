"""What a cache is: documents, arrays and versions of the format. No I/O, no numpy, no torch.

The normative text is SPEC.md in this folder.
"""
