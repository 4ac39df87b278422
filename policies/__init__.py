"""Learning and what comes out of it: observers, networks, learners, export, and the policy file with its contract."""
