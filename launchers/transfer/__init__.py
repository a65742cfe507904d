"""Transfer of snapshots to the hosts of a cluster and back, and collection of garbage in their stores."""
