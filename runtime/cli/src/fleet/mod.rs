//! Several processes as one fleet: `mixfleet router`, `mixfleet worker`, `mixfleet member`, `mixfleet fleet`.

mod join;
mod member;
mod node;
mod process;
mod status;
mod transports;

use crate::args::{FrontArgs, InstanceArgs, ModelArgs};
use crate::tls::TlsArgs;
use clap::{Args, Subcommand, ValueEnum};

pub(crate) use member::{MemberArgs, member};
pub(crate) use process::{router, worker};
pub(crate) use status::look;

/// Options for joining a fleet.
#[derive(Clone, Debug, Args)]
pub(crate) struct JoinArgs {
    /// URLs of etcd, separated by commas
    #[arg(long, value_name = "URL,URL", value_delimiter = ',', required = true)]
    etcd: Vec<String>,
    /// Name of the fleet; all members serve one model
    #[arg(long, value_name = "NAME", default_value = "default", hide_default_value = true)]
    fleet: String,
    /// Silence after which a member counts as lost [default: 5]
    #[arg(long, value_name = "SECONDS", default_value_t = 5, hide_default_value = true, value_parser = crate::numbers::count::<u64>(2..=300))]
    lease_s: u64,
    /// Shared secret of processes on this host [default: one per user]
    #[arg(long, value_name = "FILE", conflicts_with = "tls_ca", hide = true)]
    token_file: Option<std::path::PathBuf>,
    #[command(flatten)]
    tls: TlsArgs,
}

#[derive(Debug, Args)]
pub(crate) struct RouterArgs {
    #[command(flatten)]
    join: JoinArgs,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    pub(crate) front: FrontArgs,
    #[cfg(feature = "epp")]
    #[command(flatten)]
    scaling: crate::epp::ScalerArgs,
}

#[derive(Debug, Args)]
pub(crate) struct WorkerArgs {
    #[command(flatten)]
    join: JoinArgs,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    instances: InstanceArgs,
    /// Default role of devices: auto, prefill or decode; kv: no device
    #[arg(long, value_name = "ROLE", default_value = "auto", value_parser = crate::args::worker_role)]
    role: mixfleet_scheduler::fleet::Role,
    /// Address for routers and other workers; port 0 picks a free port
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:0")]
    listen_control: String,
    /// Address for KV [default: a free port of the same address]
    #[arg(long, value_name = "HOST:PORT")]
    listen_data: Option<String>,
    /// Transports for KV, best first [default: memory,shm,verbs,tcp]
    #[arg(
        long,
        value_name = "NAME,NAME",
        value_delimiter = ',',
        default_value = "memory,shm,verbs,tcp",
        hide_default_value = true,
        hide_possible_values = true
    )]
    transports: Vec<TransportName>,
    /// Address for /live, /health and /metrics [default: none]
    #[arg(long, value_name = "HOST:PORT")]
    listen_http: Option<String>,
    /// Allow unencrypted RDMA, on a network without other users
    #[arg(long)]
    trusted_fabric: bool,
    /// NICs for RDMA [default: the nearest to the devices]
    #[arg(long, value_name = "NAME,NAME", value_delimiter = ',', requires = "trusted_fabric")]
    rdma_devices: Vec<String>,
    /// Log as JSON lines
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TransportName {
    Memory,
    Shm,
    Verbs,
    Tcp,
}

#[derive(Debug, Args)]
pub(crate) struct FleetArgs {
    #[command(subcommand)]
    command: FleetCommand,
}

#[derive(Debug, Subcommand)]
enum FleetCommand {
    /// List routers and workers, their devices, and the links between them
    Status(StatusArgs),
}

#[derive(Debug, Args)]
struct StatusArgs {
    #[command(flatten)]
    join: JoinArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}
