"""Causal models as graphs without Python: an ONNX file, or a package that PyTorch's AOTInductor compiles."""
