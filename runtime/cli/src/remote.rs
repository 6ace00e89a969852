//! Devices of other processes on the command line.

#[cfg(feature = "fleet")]
use crate::failure::UsageError;
use crate::tls::TlsArgs;
#[cfg(feature = "fleet")]
use anyhow::Context;
use anyhow::Result;
use clap::Args;
use mixfleet_hal::Device;
use mixfleet_remote::RemoteDevice;
#[cfg(feature = "fleet")]
use mixfleet_wire::LinkAddress;
use std::path::PathBuf;
use std::sync::Arc;

/// Prefix of the address of a process that lends a device, as in `remote:127.0.0.1:7001`,
/// `remote:rdma:10.0.0.2:7001` or `remote:unix:/run/mixfleet/gpu0`.
pub(crate) const PREFIX: &str = "remote:";

/// How processes that lend each other devices authenticate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub(crate) struct RemoteArgs {
    /// Secret shared with processes of this host that lend devices [default: one per user]
    #[arg(long, value_name = "FILE", conflicts_with = "tls_ca")]
    token_file: Option<PathBuf>,
    #[command(flatten)]
    tls: TlsArgs,
}

/// An open device.
#[derive(Clone)]
pub(crate) struct OpenDevice {
    pub(crate) device: Arc<dyn Device>,
    /// The same, if it is of another process.
    remote: Option<Arc<RemoteDevice>>,
}

impl OpenDevice {
    /// A device of this process.
    pub(crate) fn here(device: Arc<dyn Device>) -> Self {
        OpenDevice { device, remote: None }
    }

    /// Places weights by `recipe`, which is kept if their memory may be lost with another process.
    pub(crate) fn place<T, E: std::fmt::Display>(
        &self,
        recipe: impl Fn(&dyn Device) -> Result<T, E> + Send + Sync + 'static,
    ) -> Result<T, E> {
        match &self.remote {
            Some(remote) => remote.place(recipe),
            None => recipe(&*self.device),
        }
    }
}

impl RemoteArgs {
    /// By what members of a fleet show each other too.
    #[cfg(feature = "fleet")]
    pub(crate) fn new(token_file: Option<PathBuf>, tls: TlsArgs) -> Self {
        RemoteArgs { token_file, tls }
    }

    /// Leaves these flags out of the help of commands that seldom need them.
    pub(crate) fn hidden(flag: clap::Arg) -> clap::Arg {
        let is_own = flag.get_id() == "token_file" || flag.get_id().as_str().starts_with("tls_");
        if is_own { flag.hide(true) } else { flag }
    }

    /// Opens the device lent by the process at `address`.
    #[cfg(feature = "fleet")]
    pub(crate) fn open(&self, selector: &str, text: &str) -> Result<OpenDevice> {
        let address = address(selector, text)?;
        let cannot = || format!("cannot use the device of 'mixfleet member --device DEV --listen {text}'");
        let device = Arc::new(RemoteDevice::open(selector, address, self.access()?).with_context(cannot)?);
        Ok(OpenDevice { device: device.clone(), remote: Some(device) })
    }

    #[cfg(not(feature = "fleet"))]
    pub(crate) fn open(&self, selector: &str, _: &str) -> Result<OpenDevice> {
        let _ = (&self.token_file, &self.tls);
        anyhow::bail!(
            "{selector}: this build uses no devices of other processes: build with the feature fleet"
        )
    }

    /// Certificates if there are some, and else this host's token.
    #[cfg(feature = "fleet")]
    pub(crate) fn access(&self) -> Result<mixfleet_remote::DeviceAccess> {
        let security = self.tls.security()?;
        let secret: Option<Arc<dyn mixfleet_remote::SharedSecret>> = match self.tls.are_given() {
            true => None,
            false => Some(Arc::new(HostToken(crate::token::load(self.token_file.as_deref())?))),
        };
        Ok(mixfleet_remote::DeviceAccess { security, secret })
    }
}

/// The address after a flag or in a selector: a port, over TCP or RDMA, or a socket file.
#[cfg(feature = "fleet")]
pub(crate) fn address(what: &str, text: &str) -> Result<LinkAddress> {
    let wrong =
        |why: &str| UsageError(format!("{what}: {why}; expected HOST:PORT, rdma:HOST:PORT or unix:PATH"));
    if let Some(path) = LinkAddress::path_in(text) {
        let is_empty = path.as_os_str().is_empty();
        return if is_empty {
            Err(wrong("a path is missing").into())
        } else {
            Ok(LinkAddress::Unix(path.into()))
        };
    }
    let by_rdma = LinkAddress::rdma_port_in(text);
    let found = std::net::ToSocketAddrs::to_socket_addrs(by_rdma.unwrap_or(text))
        .map_err(|error| wrong(&error.to_string()))?
        .next();
    let port = found.ok_or_else(|| wrong("no such address"))?;
    Ok(if by_rdma.is_some() { LinkAddress::Rdma(port) } else { LinkAddress::Tcp(port) })
}

/// The token of the processes of one host.
#[cfg(feature = "fleet")]
struct HostToken(mixfleet_runtime::fleet::rpc::Token);

/// What the token proves the knowledge of, beside other calls of the fleet.
#[cfg(feature = "fleet")]
const PATH: &str = "/mixfleet/device";

#[cfg(feature = "fleet")]
impl mixfleet_remote::SharedSecret for HostToken {
    fn prove(&self, address: &LinkAddress, greeting: &[u8]) -> Option<mixfleet_remote::Shown> {
        let proof = self.0.prove(PATH, address, greeting)?;
        let token = self.0.clone();
        let shown = proof.shown.clone();
        let is_answered = Box::new(move |answer: &[u8]| token.is_answered(&proof, answer));
        Some(mixfleet_remote::Shown { proof: shown, is_answered })
    }

    fn admit(&self, proof: &[u8], address: &LinkAddress, greeting: &[u8]) -> Option<Vec<u8>> {
        self.0.admit(proof, PATH, address, greeting)
    }
}
