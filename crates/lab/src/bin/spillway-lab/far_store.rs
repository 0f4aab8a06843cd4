//! `store-proxy`: a proxy in front of a registry's store, for people. Owns its options and what it says when it has started; what it
//! does is the test kit's.

use anyhow::{Result, anyhow};
use spillway_testkit::store_proxy::{Origin, StoreModel, StoreProxy, StoreProxySettings};
use std::convert::Infallible;
use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Options of `store-proxy`.
#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("origin").required(true).args(["to", "folder"])))]
pub struct ProxyOptions {
    /// Where clients are answered
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Where the control endpoint is
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:0")]
    control: SocketAddr,
    /// The store
    #[arg(long, value_name = "URL", value_parser = Origin::http)]
    to: Option<Origin>,
    /// A folder that is a registry
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
    /// What it does
    #[arg(long, default_value = "", value_parser = StoreModel::parse)]
    model: StoreModel,
    /// Seed of its random choices
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

/// Serves until the process is ended.
pub fn run(args: &ProxyOptions) -> Result<Infallible> {
    let ProxyOptions { listen, control, to, folder, model, seed } = args;
    let origin = match (to, folder) {
        (Some(store), _) => store.clone(),
        (None, Some(folder)) if folder.is_dir() => Origin::Folder(folder.clone()),
        (None, Some(folder)) => return Err(anyhow!("{}: it is no folder", folder.display())),
        (None, None) => return Err(anyhow!("name a store (--to) or a folder (--folder)")),
    };
    let settings = StoreProxySettings {
        listen: *listen,
        control: Some(*control),
        origin,
        model: model.clone(),
        seed: *seed,
    };
    let proxy = StoreProxy::start(settings)?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "store    {}", proxy.url())?;
    writeln!(out, "control  {}", proxy.control_url().unwrap_or_default())?;
    out.flush()?;
    drop(out);
    proxy.run()
}
