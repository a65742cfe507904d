"""Format of a checkpoint: names, layout, manifest, checksums and the two file formats of weights."""
