//! Implements `mixfleet member`: lends a device to an instance of another process.

use crate::affinity::LocatedDevices;
use crate::failure::UsageError;
use crate::remote::{self, RemoteArgs};
use crate::serve::ServeSignals;
use crate::{backends, serve};
use anyhow::Result;
use clap::Args;
use mixfleet_remote::DeviceServer;

#[derive(Debug, Args)]
pub(crate) struct MemberArgs {
    /// The device to lend
    #[arg(long, value_name = "DEV")]
    device: String,
    /// Address for the processes that use it; port 0 picks a free port, rdma:HOST:PORT moves data by RDMA,
    /// which does not encrypt it, and unix:PATH shares memory with processes of this user
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:0")]
    listen: String,
    #[command(flatten)]
    remote: RemoteArgs,
    /// Let threads leave the NUMA node of the device
    #[arg(long)]
    no_pin: bool,
    /// Log as JSON lines
    #[arg(long)]
    json: bool,
}

pub(crate) fn member(args: &MemberArgs) -> Result<()> {
    serve::log(args.json)?;
    let address = remote::address(&format!("--listen {}", args.listen), &args.listen)?;
    if address.port().is_some_and(|port| port.ip().is_unspecified()) {
        let message = "is every address of this host: give the one by which others reach it";
        return Err(UsageError(format!("--listen {} {message}", args.listen)).into());
    }
    let access = args.remote.access()?;
    let device = backends::open(&args.device)?;
    let located = LocatedDevices::of_device(&*device);
    let server = DeviceServer::bind(&address, device, access)?;
    tracing::info!(device = args.device, "ready: remote:{}", server.address());
    // the thread of each user is started by this one, and stays where it is
    let accept = move || std::thread::Builder::new().name("lend-accept".into()).spawn(move || server.run());
    match args.no_pin {
        true => accept(),
        false => located.start_near("the threads of users", accept)?,
    }?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        ServeSignals::new()?.next().await;
        Ok(())
    })
}
