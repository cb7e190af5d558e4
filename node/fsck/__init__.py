"""Check and repair of a node's stored data while the node is not running."""
