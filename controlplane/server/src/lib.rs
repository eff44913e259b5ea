//! Admin API, sync service, registration jobs, prober.
