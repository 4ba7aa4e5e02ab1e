"""Chapter 21: gradients are compressed before they travel."""
