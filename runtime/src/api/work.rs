//! Work that could hold up other requests if it ran where they are served.

use super::errors::ApiError;
use crate::env::SharedEnv;

/// Text up to this long is tokenised in place: at 5 MB/s it takes 3 ms, and a thread is not free either.
const IN_PLACE_BYTES_MAX: usize = 16 << 10;

/// The result of `work` on `bytes` of text.
pub(crate) async fn run<T: Send + 'static>(
    env: &SharedEnv,
    bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiError> {
    if bytes <= IN_PLACE_BYTES_MAX {
        return Ok(work());
    }
    let (sender, receiver) = tokio::sync::oneshot::channel();
    // The receiver is gone when the client has left.
    let task = async move { drop(sender.send(work())) };
    env.spawn_worker("tokenizer", Box::pin(task)).map_err(|error| {
        let reason = format!("no thread can tokenise the prompt at present: {error}");
        ApiError::unavailable("exhausted", &reason, 1)
    })?;
    receiver.await.map_err(|_| ApiError::server("tokenising the prompt failed"))
}
