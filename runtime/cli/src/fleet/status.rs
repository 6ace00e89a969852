//! Implements `mixfleet fleet status`.

#![allow(clippy::print_stdout, reason = "it is what the command is for")]

use super::{FleetArgs, FleetCommand, JoinArgs, StatusArgs};
use anyhow::{Context, Result};
use mixfleet_hal::printable::{printable, printable_lines};
use mixfleet_runtime::env::{RealEnv, SharedEnv};
use mixfleet_runtime::fleet::registry::{LinkState, Member, Members, Seat};
use serde_json::json;
use std::fmt::Write;
use std::sync::Arc;

/// Runs `mixfleet fleet`.
pub(crate) fn look(args: FleetArgs) -> Result<()> {
    let FleetCommand::Status(StatusArgs { join, json }) = args.command;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let members = runtime.block_on(members(&join))?;
    if json {
        let members: Vec<&Member> = members.values().collect();
        let document = json!({"schema": "mixfleet.fleet/1", "fleet": join.fleet, "members": members});
        println!("{}", printable_lines(&format!("{document:#}")));
    } else {
        print!("{}", printable_lines(&table(&members)));
    }
    Ok(())
}

async fn members(args: &JoinArgs) -> Result<Members> {
    let env: SharedEnv = Arc::new(RealEnv::new(tokio::runtime::Handle::current()));
    let registry = args.registry(&env).await?;
    registry.members().await.with_context(|| format!("--etcd {}", args.etcd.join(",")))
}

fn table(members: &Members) -> String {
    let mut text = String::new();
    if members.is_empty() {
        return "this fleet has no members\n".into();
    }
    for (name, member) in members.iter() {
        let (name, address, version) =
            (printable(name), printable(&member.address), printable(&member.version));
        let _ = writeln!(text, "{name:<12} {address:<21} mixfleet {version}");
        if let Seat::Worker { instances, transports, not_offered } = &member.seat {
            for instance in instances {
                let price = instance.usd_per_hour.map_or("no price".into(), |usd| format!("{usd} $/h"));
                let (id, device, tokens) =
                    (instance.id, printable(&instance.device), instance.kv_capacity_tokens);
                let role = instance.role.name();
                let state = if instance.degraded { "degraded: not the declared part" } else { "healthy" };
                let _ =
                    writeln!(text, "  {id:<10} {device:<21} {role:<8} {state}, {tokens} KV tokens, {price}");
            }
            let _ = writeln!(text, "  KV by {}", printable(&transports.join(", ")));
            for reason in not_offered {
                let _ = writeln!(text, "  not by {}", printable(reason));
            }
        }
    }
    let links =
        members.iter().flat_map(|(from, member)| member.links.iter().map(move |(to, l)| (from, to, l)));
    // The records of other members may still list a member that left.
    for (from, to, link) in links.filter(|(_, to, _)| members.contains_key(*to)) {
        let state = match link {
            LinkState::Up { transport, latency_s, bytes_per_s, details, broken } => {
                let broken: String = broken.iter().map(|reason| format!("; broken: {reason}")).collect();
                let details = if details.is_empty() { String::new() } else { format!(" ({details})") };
                let (us, gb) = (latency_s * 1e6, bytes_per_s / 1e9);
                format!("{transport}{details}, {us:.1} us, {gb:.2} GB/s{broken}")
            }
            LinkState::Down { reason } => format!("down: {reason}"),
        };
        let _ = writeln!(text, "{} <-> {}: {}", printable(from), printable(to), printable(&state));
    }
    text
}
