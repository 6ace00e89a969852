//! Tests of the two machines and the cost model through their public interface.

mod collective_data;
mod fleet_run;
mod models_data;
mod prefill_service;
mod quarantine;
mod step3_data;
mod two_clusters;
