//! The reference of the commands, from what each program says of itself with `--help`.
//!
//! Invariant: a command that a program lists is in it; nothing is said of a command but its own words.

use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::process::Command;

/// Programs that users start.
const PROGRAMS: [&str; 2] = ["spillway", "spillwayd"];

/// One section for each command of the programs in this folder.
pub fn page(programs: &Path) -> Result<String> {
    let mut text = String::new();
    for program in PROGRAMS {
        add(&programs.join(program), &mut vec![program.to_owned()], &mut text)?;
    }
    Ok(text)
}

fn add(program: &Path, command: &mut Vec<String>, text: &mut String) -> Result<()> {
    let said = help(program, &command[1..])?;
    text.push_str(&format!("\n## {}\n\n```text\n{}\n```\n", command.join(" "), said.trim_end()));
    for name in commands(&said) {
        command.push(name.to_owned());
        add(program, command, text)?;
        command.pop();
    }
    Ok(())
}

fn help(program: &Path, command: &[String]) -> Result<String> {
    let mut ask = Command::new(program);
    // What it says must not depend on who builds the book.
    ask.args(command).arg("--help").env_clear();
    let done =
        ask.output().with_context(|| format!("{}: cannot be started: build it first", program.display()))?;
    ensure!(done.status.success(), "{} {} --help: {}", program.display(), command.join(" "), done.status);
    String::from_utf8(done.stdout).with_context(|| format!("{}: no UTF-8", program.display()))
}

/// The commands that a help lists.
fn commands(help: &str) -> Vec<&str> {
    let list = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let names = list.take_while(|line| !line.is_empty()).filter_map(|line| {
        let name = line.strip_prefix("  ")?.split(' ').next()?;
        (!name.is_empty() && name != "help").then_some(name)
    });
    names.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_those_that_the_help_lists() {
        let help = "Does it\n\nUsage: x\n\nCommands:\n  serve          Serve\n                 more\n  storage-model  Slow\n  help           Help\n\nOptions:\n  -h\n";
        assert_eq!(commands(help), ["serve", "storage-model"]);
        assert!(commands("Does it\n").is_empty());
    }
}
