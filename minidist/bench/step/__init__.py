"""`minidist bench step`: a training step of ours beside PyTorch's."""
