//! The programs of etcd that tests run: Debian's, and one that Go builds. Owns where they are.
//!
//! Invariant: nothing is installed outside `.cache/tools`.

use crate::has_program;
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A version of etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EtcdProgram {
    /// 3.4 of Debian's package `etcd-server`, which `make install-deps` takes the program from.
    Debian34,
    /// 3.6, which `scripts/etcd-3.6` builds.
    Go36,
}

impl EtcdProgram {
    /// Path of the program. That of 3.6 is built first, if it is not there.
    pub fn path(self) -> Result<PathBuf> {
        match self {
            EtcdProgram::Debian34 => tool("etcd"),
            EtcdProgram::Go36 => {
                let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/etcd-3.6");
                let done = Command::new(&script).output().context("scripts/etcd-3.6")?;
                let why = String::from_utf8_lossy(&done.stderr);
                ensure!(done.status.success(), "scripts/etcd-3.6 has not built it: {why}");
                Ok(String::from_utf8(done.stdout)?.trim().into())
            }
        }
    }
}

/// Path of Debian's `etcdctl`, which asks servers of both versions.
pub fn etcdctl() -> Result<PathBuf> {
    tool("etcdctl")
}

fn tool(name: &str) -> Result<PathBuf> {
    let taken = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache/tools").join(name);
    if taken.exists() {
        return Ok(taken);
    }
    ensure!(has_program(name), "{name} is not here: run 'make install-deps'");
    Ok(name.into())
}
