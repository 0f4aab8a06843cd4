//! `spillway set`: other limits for a disk that is being used. The server decides whether they can be.

use crate::args::Set;
use crate::error::{Exit, Failure};
use crate::output;
use spillway_control::{Client, LimitChange, Limits, Request, bytes};

/// Asks for a change and shows the limits that hold then.
pub fn set(args: &Set) -> Result<(), Failure> {
    let change = LimitChange {
        ram_bytes: args.ram,
        overflow_bytes: args.overflow,
        full: args.full,
        warn_at: args.warn_at,
        critical_at: args.critical_at,
        iops: args.rate.iops,
        iops_burst: args.rate.iops_burst,
        bandwidth_bytes: args.rate.bandwidth,
        bandwidth_burst_bytes: args.rate.bandwidth_burst,
    };
    let answer = Client::connect(&args.control)?.ask(&Request::Set(change.clone()))?;
    if !change.rate_is_met(&answer) {
        let why = "an earlier version serves this disk, which limits no rate: 'spillway upgrade' it first";
        return Err(Failure::new(Exit::Refused, format!("{}: {why}", args.control.display())));
    }
    if args.json {
        output::print(&format!("{answer}\n"))?;
        return Ok(());
    }
    let limits: Limits = serde_json::from_value(answer)
        .map_err(|e| Failure::new(Exit::Internal, format!("the server said something else: {e}")))?;
    let limit = |n: u64| if n == 0 { "none".into() } else { bytes(n) };
    output::print(&format!(
        "RAM {}, overflow {}, when full {}, warning at {}%, critical at {}%, {}\n",
        limit(limits.ram_bytes),
        limit(limits.overflow_bytes),
        limits.full.name(),
        limits.warn_at,
        limits.critical_at,
        limits.rate
    ))?;
    Ok(())
}
