//! Many processes as one fleet: `mixfleet router`, `mixfleet worker`, `mixfleet fleet`.

mod join;
mod process;
mod status;
mod token;
mod transports;

use crate::args::{FrontArgs, InstanceArgs, ModelArgs};
use crate::tls::TlsArgs;
use clap::{Args, Subcommand, ValueEnum};

pub(crate) use process::{router, worker};
pub(crate) use status::look;

/// Where the fleet is, and how its members know each other.
#[derive(Clone, Debug, Args)]
pub(crate) struct JoinArgs {
    /// Where etcd is; several with commas
    #[arg(long, value_name = "URL,URL", value_delimiter = ',', required = true)]
    etcd: Vec<String>,
    /// Name of the fleet: all its members serve one model
    #[arg(long, value_name = "NAME", default_value = "default", hide_default_value = true)]
    fleet: String,
    /// A member that says nothing for so long is lost [default: 5]
    #[arg(long, value_name = "SECONDS", default_value_t = 5, hide_default_value = true, value_parser = clap::value_parser!(u64).range(2..=300))]
    lease_s: u64,
    /// Secret of all processes of this host, without certificates [default: one of this user]
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
    front: FrontArgs,
}

#[derive(Debug, Args)]
pub(crate) struct WorkerArgs {
    #[command(flatten)]
    join: JoinArgs,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    instances: InstanceArgs,
    /// auto, prefill or decode: for devices without a role of their own
    #[arg(long, value_name = "ROLE", default_value = "auto", value_parser = crate::args::role)]
    role: mixfleet_scheduler::fleet::Role,
    /// Where routers and other workers reach this process; port 0 takes a free one
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:0")]
    listen_control: String,
    /// Where KV comes in [default: a free port of the same address]
    #[arg(long, value_name = "HOST:PORT")]
    listen_data: Option<String>,
    /// How KV may travel, best first: without one that is broken here [default: memory,shm,verbs,tcp]
    #[arg(
        long,
        value_name = "NAME,NAME",
        value_delimiter = ',',
        default_value = "memory,shm,verbs,tcp",
        hide_default_value = true,
        hide_possible_values = true
    )]
    transports: Vec<TransportName>,
    /// Where /live, /health and /metrics are answered [default: nowhere]
    #[arg(long, value_name = "HOST:PORT")]
    listen_http: Option<String>,
    /// KV may go over RDMA, in the clear: nobody else can read or send on its network
    #[arg(long)]
    trusted_fabric: bool,
    /// NICs for RDMA, the nearest first [default: all]
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
