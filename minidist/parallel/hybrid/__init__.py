"""Chapter 17: all axes together; Mesh, Plan and Trainer."""
