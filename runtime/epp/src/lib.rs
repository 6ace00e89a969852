//! The endpoint picker of Envoy and of Kubernetes inference gateways: Endpoint Picker Protocol 1.0.0 over
//! Envoy's external processing.
//!
//! A proxy streams each request and its answer through [`EndpointPicker`] and gets all bytes back unchanged.
//! `message` reads and builds the protocol's messages, `exchange` is one request with its answer, `pool`
//! reads the file that lists the endpoints, and [`follow_pool`] applies changes of the file. `kubernetes`
//! follows an `InferencePool` and its pods instead. `scaler` tells KEDA the replicas of a planned fleet.
//! `state` holds the shared state of requests. Placement, predictions, corrections and explanations are those
//! of the runtime's picker, in which endpoints are engines.
//!
//! Absent: placement decisions, changes of bodies, objects of Kubernetes other than a lease that it writes.

#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![forbid(unsafe_code)]

mod exchange;
mod follow;
mod kubernetes;
mod message;
mod pool;
mod scaler;
mod service;
mod state;

pub use follow::{OpenPool, OpenedPool, follow_pool};
pub use kubernetes::{ClusterAccess, LeaseTimes, PickerLease, PoolName, follow_inference_pool, hold_lease};
pub use pool::{EndpointPool, PoolEndpoint};
pub use scaler::FleetScaler;
pub use service::{EndpointPicker, PickerListeners, serve};
pub use state::PickerSettings;
