//! `cargo run -p xtask walls`, `... house` and `... licences`: rules that a compiler does not know.
//!
//! Owns the checks and lists every breach, not only the first; changes nothing.

mod house;
mod licences;
mod rooms;
mod texts;
mod walls;
mod words;

use anyhow::{Context, Result, bail};
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    match run(std::env::args().nth(1).as_deref()) {
        Ok(breaches) if breaches.is_empty() => ExitCode::SUCCESS,
        Ok(breaches) => {
            for breach in &breaches {
                eprintln!("{breach}");
            }
            eprintln!("{} breaches", breaches.len());
            ExitCode::FAILURE
        }
        Err(e) => {
            eprintln!("xtask: {e:#}");
            ExitCode::from(2)
        }
    }
}

fn run(check: Option<&str>) -> Result<Vec<String>> {
    match check {
        Some("walls") => Ok(walls::breaches(&metadata()?)),
        Some("licences") => Ok(licences::breaches(&metadata()?)),
        Some("house") => {
            let root = output("git", &["rev-parse", "--show-toplevel"])?;
            let files = output("git", &["ls-files", "--full-name", "*.rs"])?;
            let mut found = house::breaches(root.trim().as_ref(), files.lines())?;
            found.extend(rooms::breaches(root.trim().as_ref(), files.lines())?);
            let all = output("git", &["ls-files", "--full-name"])?;
            found.extend(words::breaches(root.trim().as_ref(), all.lines())?);
            let document = std::path::Path::new(root.trim()).join("docs/api/openapi.json");
            let text = std::fs::read_to_string(&document).context("docs/api/openapi.json")?;
            found.extend(texts::breaches(&serde_json::from_str(&text).context("docs/api/openapi.json")?));
            Ok(found)
        }
        _ => bail!("usage: cargo run -p xtask -- walls|house|licences"),
    }
}

fn metadata<T: serde::de::DeserializeOwned>() -> Result<T> {
    let text = output("cargo", &["metadata", "--format-version=1", "--locked"])?;
    serde_json::from_str(&text).context("cargo metadata")
}

fn output(program: &str, arguments: &[&str]) -> Result<String> {
    let output =
        Command::new(program).args(arguments).output().with_context(|| format!("cannot start {program}"))?;
    if !output.status.success() {
        bail!("{program} {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr));
    }
    String::from_utf8(output.stdout).with_context(|| format!("{program} printed no UTF-8"))
}
