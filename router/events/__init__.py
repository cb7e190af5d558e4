"""What happens in the fleet, as it happens: typed events, and the bus that brings them."""
