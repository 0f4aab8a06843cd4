//! `cargo run -p xtask walls` and `... house`: rules that a compiler does not know; `... book`: what mdBook builds from.
//!
//! Owns the checks and lists every breach, not only the first; changes nothing but the folder of a book.

mod book;
mod house;
mod rooms;
mod texts;
mod walls;

use anyhow::{Context, Result, bail};
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments.iter().map(String::as_str).collect::<Vec<_>>()) {
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

fn run(arguments: &[&str]) -> Result<Vec<String>> {
    match arguments {
        ["walls"] => {
            let text = output("cargo", &["metadata", "--format-version=1", "--locked"])?;
            let metadata = serde_json::from_str(&text).context("cargo metadata")?;
            Ok(walls::breaches(&metadata))
        }
        ["house"] => {
            let root = output("git", &["rev-parse", "--show-toplevel"])?;
            let files = output("git", &["ls-files", "--full-name", "*.rs"])?;
            let mut found = house::breaches(root.trim().as_ref(), files.lines())?;
            found.extend(rooms::breaches(root.trim().as_ref(), files.lines())?);
            let document = std::path::Path::new(root.trim()).join("docs/api/openapi.json");
            let text = std::fs::read_to_string(&document).context("docs/api/openapi.json")?;
            found.extend(texts::breaches(&serde_json::from_str(&text).context("docs/api/openapi.json")?));
            let all = output("git", &["ls-files", "--full-name", ":/"])?;
            found.extend(book::breaches(root.trim().as_ref(), &all.lines().collect::<Vec<_>>())?);
            Ok(found)
        }
        ["book", programs, out] => {
            let root = output("git", &["rev-parse", "--show-toplevel"])?;
            let all = output("git", &["ls-files", "--full-name", ":/"])?;
            let files: Vec<&str> = all.lines().collect();
            book::assemble(root.trim().as_ref(), &files, programs.as_ref(), out.as_ref())?;
            Ok(Vec::new())
        }
        ["links", folder] => book::html_breaches(folder.as_ref()),
        _ => bail!(
            "usage: cargo run -p xtask -- walls|house|book PROGRAMS OUT|links FOLDER
  walls               imports between crates
  house               habits of files, owners, texts, links between pages
  book PROGRAMS OUT   put together what mdBook builds from, with the help of the programs in the folder PROGRAMS
  links FOLDER        links of a finished book"
        ),
    }
}

fn output(program: &str, arguments: &[&str]) -> Result<String> {
    let output =
        Command::new(program).args(arguments).output().with_context(|| format!("cannot start {program}"))?;
    if !output.status.success() {
        bail!("{program} {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr));
    }
    String::from_utf8(output.stdout).with_context(|| format!("{program} printed no UTF-8"))
}
