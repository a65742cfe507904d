"""What keeps a run alive and its promises when the platform takes machines away."""
