//! Options for allowed connections, host names and the address for monitoring.

use crate::failure::UsageError;
use anyhow::{Context, Result};
use clap::Args;
use mixfleet_runtime::api::{Limits, Origins};
use mixfleet_runtime::budget::Connections;
use mixfleet_runtime::env::{Listener, RealEnv, SharedEnv, Task};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::net::ToSocketAddrs;
use std::sync::Arc;
use std::time::Duration;

/// Number of descriptors beyond which more are useless.
const DESCRIPTORS_MAX: u64 = 1 << 20;

/// Options of processes that clients connect to.
#[derive(Debug, Args)]
pub(crate) struct ConnectionArgs {
    /// Also serve /live, /health, /metrics here, on a separate thread
    #[arg(long, value_name = "HOST:PORT")]
    health_listen: Option<String>,
    /// Host name that clients may use; repeatable
    #[arg(long, value_name = "HOST")]
    allow_host: Vec<String>,
    /// Allowed web origin: https://HOST; repeatable
    #[arg(long, value_name = "ORIGIN")]
    allow_origin: Vec<String>,
    /// Time to finish requests at shutdown [default: 30]
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, hide_default_value = true, value_parser = crate::numbers::seconds_or_none)]
    drain_s: f64,
}

impl ConnectionArgs {
    /// Rejects implausible values.
    pub(crate) fn check(&self) -> Result<()> {
        if Duration::try_from_secs_f64(self.drain_s).is_err() {
            return Err(UsageError(format!("--drain-s {} is not a number of seconds", self.drain_s)).into());
        }
        if let Some(address) = &self.health_listen {
            is_loopback("--health-listen", address)?;
        }
        self.origins("--listen", "127.0.0.1:0").map(drop)
    }

    /// Returns the seconds from a signal to the end.
    pub(crate) fn drain_s(&self) -> f64 {
        self.drain_s
    }

    /// Returns the limits on connections and their shutdown.
    pub(crate) fn limits(&self, descriptors: u64) -> Limits {
        let drain_timeout = Duration::try_from_secs_f64(self.drain_s).unwrap_or_default();
        Limits { connections: Connections::within(descriptors), drain_timeout, ..Limits::default() }
    }

    /// Returns the allowed hosts and origins of a server that listens at the address of a flag.
    pub(crate) fn origins(&self, flag: &str, address: &str) -> Result<Origins> {
        let origins = Origins::new(is_loopback(flag, address)?, &self.allow_host, &self.allow_origin);
        origins.map_err(|error| UsageError(format!("--allow-host, --allow-origin: {error}")).into())
    }

    /// Starts the health server, if requested.
    pub(crate) async fn watch(
        &self,
        serve: impl FnOnce(Box<dyn Listener>, SharedEnv, Origins) -> Task,
    ) -> Result<()> {
        let Some(address) = &self.health_listen else { return Ok(()) };
        let flag = "--health-listen";
        watch(flag, address, self.origins(flag, address)?, serve).await
    }
}

/// Serves health checks on a separate thread, which responds even if all others are busy.
pub(crate) async fn watch(
    flag: &str,
    address: &str,
    origins: Origins,
    serve: impl FnOnce(Box<dyn Listener>, SharedEnv, Origins) -> Task,
) -> Result<()> {
    let env = RealEnv::on_own_thread("health").with_context(|| format!("{flag}: no thread for it"))?;
    let env: SharedEnv = Arc::new(env);
    let listener = env.listen(address).await.with_context(|| format!("{flag} {address}"))?;
    tracing::info!(address = listener.address(), "answers /live, /health and /metrics");
    env.spawn(serve(listener, env.clone(), origins));
    Ok(())
}

/// Whether the address of a flag is reachable from this machine only.
pub(crate) fn is_loopback(flag: &str, address: &str) -> Result<bool> {
    let mut addresses = address
        .to_socket_addrs()
        .map_err(|error| UsageError(format!("{flag} {address}: {error}; expected HOST:PORT")))?;
    Ok(addresses.all(|address| address.ip().is_loopback()))
}

/// Raises this process's limit on open descriptors to its maximum, and returns it. The soft limit is usually
/// low for the sake of old programs.
pub(crate) fn raise_descriptors() -> u64 {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let current = current.unwrap_or(DESCRIPTORS_MAX);
    let wanted = maximum.unwrap_or(DESCRIPTORS_MAX).min(DESCRIPTORS_MAX);
    if wanted <= current {
        return current;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum }) {
        Ok(()) => wanted,
        Err(error) => {
            tracing::warn!(%error, current, wanted, "the limit on open files could not be raised");
            current
        }
    }
}
