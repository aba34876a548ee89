"""The scheduler: leases, admission, launches as Ray jobs, and supervision."""
