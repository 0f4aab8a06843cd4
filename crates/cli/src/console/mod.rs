//! `spillway console`: the web console of the daemon on this host, for one browser. Owns the address that lets that browser in.
//!
//! Invariant: only who has seen the address gets in, once; from then on its browser has a cookie.

mod connections;
mod head;
mod relay;

use crate::error::{Exit, Failure};
use crate::host::Daemon;
use crate::output;
use clap::Args;
use relay::Relay;
use spillway_api::Session;
use std::net::{Ipv4Addr, TcpListener};

/// Options of `console`.
#[derive(Debug, Args)]
#[group(skip)]
pub struct ConsoleOptions {
    /// Port on 127.0.0.1; 0: any that is free
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    port: u16,
}

/// Serves the console until it is interrupted.
pub fn console(daemon: &Daemon, args: &ConsoleOptions) -> Result<(), Failure> {
    let socket = daemon.local("console")?;
    // Who may not use the socket, or asks a daemon that is not there, is told now and not in the browser.
    let _: Session = daemon.client()?.get("/v1/session")?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, args.port)).and_then(|listener| {
        let port = listener.local_addr()?.port();
        Ok((listener, port))
    });
    let (listener, port) = listener.map_err(|e| {
        Failure::new(Exit::Create, format!("127.0.0.1:{}: {e}: give another --port", args.port))
    })?;
    let relay = Relay::new(socket, port)
        .map_err(|e| Failure::new(Exit::Internal, format!("no random bytes for an address: {e}")))?;
    let url = relay.address();
    let text = match daemon.json {
        true => format!("{}\n", serde_json::json!({ "url": url, "port": port })),
        false => format!(
            "{url}\n\nThis address lets one browser in. From another computer, run there first:\n\n    ssh -L {port}:127.0.0.1:{port} \
             HOST\n\nCtrl-C ends the console.\n"
        ),
    };
    output::print(&text)?;
    relay.serve(&listener);
    Ok(())
}
