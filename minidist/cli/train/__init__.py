"""`minidist train`: options, the run itself, its progress, report and verification."""
