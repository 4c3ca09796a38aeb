"""Students for CPUs: files of ONNX and OpenVINO, whole or in 8 bit."""
