"""What a run says of itself: its lines on a terminal, its metrics, its symptoms."""
