//! Applies the endpoints of a pool to a picker: those of a file, which is followed here, or of Kubernetes.

use crate::pool::{EndpointPool, PoolEndpoint};
use crate::service::EndpointPicker;
use mixfleet_runtime::gateway::{EngineSpec, GatewayParts};
use mixfleet_runtime::picker::Picker;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::task::AbortHandle;

/// Poll interval of the file.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The endpoints of a pool, opened.
pub struct OpenedPool {
    /// The gateway's parts other than engines.
    pub parts: GatewayParts,
    /// One engine for each endpoint, in the same order.
    pub engines: Vec<EngineSpec>,
}

/// Opens the endpoints of a pool.
pub type OpenPool = Arc<dyn Fn(&EndpointPool) -> Result<OpenedPool, String> + Send + Sync>;

/// Directs a picker to the endpoints of a pool as the pool changes.
pub(crate) struct PoolSwitch {
    picker: EndpointPicker,
    pub(crate) open: OpenPool,
    /// Endpoints whose engines have started, in the order of the engines.
    started: Arc<Mutex<Vec<PoolEndpoint>>>,
    starting: Option<AbortHandle>,
}

impl PoolSwitch {
    pub(crate) fn new(picker: EndpointPicker, open: OpenPool) -> Self {
        PoolSwitch { picker, open, started: Arc::default(), starting: None }
    }

    /// Applies a pool. Endpoints that it lacks get no further requests at once; endpoints that are new start,
    /// and the pool takes over when one of its endpoints answers.
    ///
    /// # Errors
    /// The reason why the endpoints cannot be opened; nothing has changed then.
    pub(crate) fn apply(&mut self, pool: EndpointPool) -> Result<(), String> {
        let started = self.started.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let has_started = |endpoint: &PoolEndpoint| started.contains(endpoint);
        if !started.is_empty() && pool.endpoints.iter().all(has_started) {
            self.stop_starting();
            self.picker.narrow(&pool);
            tracing::info!(endpoints = pool.endpoints.len(), "the pool's endpoints get requests");
            return Ok(());
        }
        if pool.endpoints.is_empty() {
            self.stop_starting();
            self.picker.narrow(&pool);
            tracing::warn!("the pool has no endpoints");
            return Ok(());
        }
        let opened = (self.open)(&pool)?;
        self.stop_starting();
        // an endpoint that has only been described anew gets requests until the new pool takes over
        let stays =
            pool.endpoints.iter().any(|endpoint| started.iter().any(|one| one.address == endpoint.address));
        if stays {
            self.picker.narrow(&pool);
        }
        let (picker, started) = (self.picker.clone(), self.started.clone());
        let starting = tokio::spawn(async move {
            take_over(&picker, opened, &pool).await;
            *started.lock().unwrap_or_else(PoisonError::into_inner) = pool.endpoints;
        });
        self.starting = Some(starting.abort_handle());
        Ok(())
    }

    fn stop_starting(&mut self) {
        if let Some(older) = self.starting.take() {
            older.abort();
        }
    }
}

/// Follows a pool's file forever. A file that is unreadable or invalid changes nothing.
pub async fn follow_pool(picker: EndpointPicker, file: PathBuf, open: OpenPool) {
    let mut switch = PoolSwitch::new(picker, open);
    let mut known: Option<Result<String, String>> = None;
    loop {
        let path = file.clone();
        let read = tokio::task::spawn_blocking(move || mixfleet_hal::files::read_text(&path));
        let text = match read.await {
            Ok(Ok(text)) => Ok(text),
            Ok(Err(error)) => Err(error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        if known.as_ref() != Some(&text) {
            let pool = text.clone().and_then(|text| EndpointPool::read(&text));
            if let Err(why) = pool.and_then(|pool| switch.apply(pool)) {
                tracing::error!(file = %file.display(), why, "the pool's file is invalid");
            }
            known = Some(text);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Starts the engines of a pool, and directs further requests to it.
async fn take_over(picker: &EndpointPicker, opened: OpenedPool, pool: &EndpointPool) {
    let OpenedPool { parts, engines } = opened;
    assert_eq!(engines.len(), pool.endpoints.len(), "each endpoint is opened as one engine");
    let (env, metrics, placements) = (parts.env.clone(), parts.metrics.clone(), parts.placements.clone());
    let gateway = parts.start(engines).await;
    picker.take_pool(Picker::new(gateway, env, metrics, placements), pool);
    tracing::info!(endpoints = pool.endpoints.len(), "the pool's endpoints get requests");
}
