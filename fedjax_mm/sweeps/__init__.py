"""Many runs in few compiled programs: how they are planned, carried out and saved."""
