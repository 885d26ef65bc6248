"""The native core through Python: storages, views, programs, copies, threads, leaks."""
