"""`minidist bench step`: our training step compared with PyTorch's."""
