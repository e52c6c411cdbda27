"""What a run reports: its lines on a terminal, its metrics, its symptoms."""
