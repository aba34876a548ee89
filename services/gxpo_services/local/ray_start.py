"""`ray start` without Ray's client server: `python -m gxpo_services.local.ray_start start …`.

The client server is for programs outside of the cluster. Jobs do not need it, yet the whole head ends when it does,
for instance as a busy machine did not answer it within its 30 s. No option turns it off: Ray leaves it out only
where its dependencies are missing, which this module simulates.
"""

from __future__ import annotations

from ray.scripts import scripts

if __name__ == "__main__":
    vars(scripts)["get_ray_client_dependency_error"] = lambda: ImportError("the client server is omitted")
    scripts.main()  # type: ignore[no-untyped-call]
