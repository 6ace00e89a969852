//! Follows the file of a pool, and switches to its endpoints once one of them answers.

use crate::pool::EndpointPool;
use crate::service::EndpointPicker;
use mixfleet_runtime::gateway::{EngineSpec, GatewayParts};
use mixfleet_runtime::picker::Picker;
use std::path::PathBuf;
use std::sync::Arc;
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

/// Follows a pool's file forever. A file that is unreadable or invalid changes nothing.
pub async fn follow_pool(picker: EndpointPicker, file: PathBuf, open: OpenPool) {
    let mut known: Option<Result<String, String>> = None;
    let mut starting: Option<AbortHandle> = None;
    loop {
        let path = file.clone();
        let read = tokio::task::spawn_blocking(move || mixfleet_hal::files::read_text(&path));
        let text = match read.await {
            Ok(Ok(text)) => Ok(text),
            Ok(Err(error)) => Err(error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        if known.as_ref() != Some(&text) {
            let opened = text.clone().and_then(|text| {
                let pool = EndpointPool::read(&text)?;
                Ok((open(&pool)?, pool))
            });
            match opened {
                Ok((opened, pool)) => {
                    if let Some(older) = starting.take() {
                        older.abort();
                    }
                    starting = Some(tokio::spawn(take_over(picker.clone(), opened, pool)).abort_handle());
                }
                Err(why) => {
                    tracing::error!(file = %file.display(), why, "the pool's file is invalid");
                }
            }
            known = Some(text);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Starts the engines of a pool, and directs further requests to it.
async fn take_over(picker: EndpointPicker, opened: OpenedPool, pool: EndpointPool) {
    let OpenedPool { parts, engines } = opened;
    assert_eq!(engines.len(), pool.endpoints.len(), "each endpoint is opened as one engine");
    let (env, metrics, placements) = (parts.env.clone(), parts.metrics.clone(), parts.placements.clone());
    let gateway = parts.start(engines).await;
    picker.take_pool(Picker::new(gateway, env, metrics, placements), &pool);
    tracing::info!(endpoints = pool.endpoints.len(), "the pool's endpoints get requests");
}
