"""Storage of checkpoints: local disks, object stores and the durable commit on them."""
