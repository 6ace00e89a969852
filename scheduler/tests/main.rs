//! The two machines and the cost model from outside.

mod collective_data;
mod fleet_run;
mod models_data;
