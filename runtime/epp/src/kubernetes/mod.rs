//! Endpoints from Kubernetes: the ready pods of an `InferencePool`, followed through the API server.
//!
//! `members` turns the pool's object and its pods into endpoints, `watch` follows both, and `lease` elects
//! one of several pickers.

mod lease;
mod members;
mod watch;

pub use lease::{LeaseTimes, PickerLease, hold_lease};
pub use members::PoolName;
pub use watch::follow_inference_pool;

/// Access to an API server.
#[derive(Clone)]
pub struct ClusterAccess {
    pub(crate) client: kube::Client,
    /// The namespace of the credentials.
    pub namespace: String,
}

impl ClusterAccess {
    /// Takes the credentials of a kubeconfig file, or those of the pod that this process runs in.
    ///
    /// # Errors
    /// The reason why there are none.
    pub async fn infer() -> Result<Self, String> {
        let config = kube::Config::infer().await.map_err(|error| error.to_string())?;
        Self::by(config)
    }

    /// Without credentials, at a URL.
    ///
    /// # Errors
    /// The fault of the URL.
    pub fn at(url: &str) -> Result<Self, String> {
        Self::by(kube::Config::new(url.parse().map_err(|error| format!("'{url}': {error}"))?))
    }

    fn by(config: kube::Config) -> Result<Self, String> {
        let namespace = config.default_namespace.clone();
        let client = kube::Client::try_from(config).map_err(|error| error.to_string())?;
        Ok(ClusterAccess { client, namespace })
    }
}
