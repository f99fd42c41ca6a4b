"""What plans do, as text: invariants that a refactor leaves alone, and expectations that are accepted on purpose."""
