//! Address of the daemon, and authentication: a socket for whoever may open it, TCP for whoever has a token.
//!
//! Invariant: a token is never an argument, which every user of this host could read; an option without an effect is an
//! error.

use super::table;
use crate::error::{Exit, Failure};
use crate::output;
use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Arg, Args};
use serde::Serialize;
use serde::de::DeserializeOwned;
use spillway_api::client::{Address, AddressError, Client, HostPort, Pages, Token};
use spillway_api::{CA_VARIABLE, DEFAULT_SOCKET, HOST_VARIABLE, Name, SOCKET_VARIABLE, TOKEN_VARIABLE};
use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Where the daemon is. The same options are taken before the command and behind it.
#[derive(Debug, Args)]
pub struct Daemon {
    /// Socket that spillwayd listens on; of another host's, https://HOST:PORT [default: SPILLWAY_SOCKET, else
    /// /run/spillway/spillwayd.sock]
    #[arg(long, global = true, value_name = "SOCK", value_parser = address())]
    socket: Option<Address>,
    /// Host of a fleet that the command is for: the spillwayd that is asked passes the requests on to it, for the same user
    /// [default: SPILLWAY_HOST, else the host that is asked]
    #[arg(id = "fleet_host", long = "host", global = true, value_name = "HOST", value_parser = str::parse::<Name>)]
    host: Option<Name>,
    /// With --socket https://...: a file with the user's token [default: the token in SPILLWAY_TOKEN]
    #[arg(long, global = true, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// With --socket https://...: trusted certificates (PEM), one of which has signed spillwayd's [default: the file in SPILLWAY_CA,
    /// else the system's]
    #[arg(long, global = true, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Print JSON
    #[arg(long, global = true)]
    pub json: bool,
}

/// The same before the command, where those of other commands are none.
#[derive(Debug, Args)]
#[command(next_help_heading = "Options of commands that ask spillwayd, here or behind the command")]
pub struct GlobalDaemonOptions {
    /// Socket that spillwayd listens on; of another host's, https://HOST:PORT
    #[arg(long, value_name = "SOCK", value_parser = address())]
    socket: Option<Address>,
    /// Host of a fleet that the command is for; the spillwayd that is asked passes the requests on to it
    #[arg(id = "fleet_host", long = "host", value_name = "HOST", value_parser = str::parse::<Name>)]
    host: Option<Name>,
    /// With --socket https://...: a file with the user's token
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// With --socket https://...: trusted certificates (PEM), one of which has signed spillwayd's
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl GlobalDaemonOptions {
    /// Whether JSON is requested, for a command that does not ask the daemon.
    pub fn json(self) -> Result<bool, Failure> {
        let given = [
            ("--socket", self.socket.is_some()),
            ("--host", self.host.is_some()),
            ("--token-file", self.token_file.is_some()),
            ("--ca", self.ca.is_some()),
        ];
        match given.into_iter().find(|(_, is_given)| *is_given) {
            None => Ok(self.json),
            Some((option, _)) => Err(Failure::usage(format!(
                "{option} says which spillwayd is meant, and this command does not ask it: leave it out"
            ))),
        }
    }
}

/// Shows an option of a command that works on the daemon's own host only, which refuses those for other hosts: they are not shown.
pub fn only_local(option: Arg) -> Arg {
    match option.get_id().as_str() {
        "socket" => option.help(format!(
            "Socket that spillwayd listens on [default: {SOCKET_VARIABLE}, else {DEFAULT_SOCKET}]"
        )),
        "fleet_host" | "token_file" | "ca" => option.hide(true),
        _ => option,
    }
}

fn address() -> impl TypedValueParser<Value = Address> {
    OsStringValueParser::new()
        .try_map(|text: OsString| -> Result<Address, AddressError> { Address::parse(&text) })
}

impl Daemon {
    /// Returns the daemon of this host, without options.
    pub fn usual() -> Daemon {
        Daemon { socket: None, host: None, token_file: None, ca: None, json: false }
    }

    /// Adds the options that were given before the command, unless they are repeated after it.
    pub fn or(&mut self, before: GlobalDaemonOptions) {
        let GlobalDaemonOptions { socket, host, token_file, ca, json } = before;
        self.socket = self.socket.take().or(socket);
        self.host = self.host.take().or(host);
        self.token_file = self.token_file.take().or(token_file);
        self.ca = self.ca.take().or(ca);
        self.json |= json;
    }

    fn address(&self) -> Result<Address, Failure> {
        match (&self.socket, variable(SOCKET_VARIABLE)) {
            (Some(socket), _) => Ok(socket.clone()),
            (None, Some(text)) => {
                Address::parse(&text).map_err(|e| Failure::usage(format!("{SOCKET_VARIABLE}: {e}")))
            }
            (None, None) => Ok(Address::Socket(DEFAULT_SOCKET.into())),
        }
    }

    /// Returns the host of the fleet that requests are for, if it is said.
    fn host(&self) -> Result<Option<Name>, Failure> {
        match (&self.host, variable(HOST_VARIABLE)) {
            (Some(host), _) => Ok(Some(host.clone())),
            (None, Some(text)) => {
                let host = text.to_string_lossy().parse();
                host.map(Some).map_err(|e| Failure::usage(format!("{HOST_VARIABLE}: {e}")))
            }
            (None, None) => Ok(None),
        }
    }

    /// Returns the socket, for commands that work on the daemon's own host only.
    pub fn local(&self, what: &str) -> Result<PathBuf, Failure> {
        if let Some(host) = self.host()? {
            return Err(Failure::usage(format!(
                "{what} works on spillwayd's own host, and --host (or {HOST_VARIABLE}) names {host}: run it there, without that"
            )));
        }
        match self.address()? {
            Address::Socket(path) => Ok(path),
            Address::Remote(remote) => Err(Failure::usage(format!(
                "{what} works on spillwayd's own host, and this would ask {remote}: run it there, with the path of its socket"
            ))),
        }
    }

    /// Returns the absolute path of a file on the daemon's host. A relative one is of this host, which must be the same.
    pub fn host_path(&self, path: &Path) -> Result<PathBuf, Failure> {
        if path.is_relative() {
            let elsewhere =
                "over TCP, and with --host, it is a file of spillwayd's host: give its whole path";
            self.local("").map_err(|_| Failure::usage(format!("{}: {elsewhere}", path.display())))?;
        }
        std::path::absolute(path).map_err(|e| Failure::usage(format!("{}: {e}: give a path", path.display())))
    }

    /// Returns the client that sends requests.
    pub fn client(&self) -> Result<Client, Failure> {
        let client = self.direct_client()?;
        Ok(match self.host()? {
            Some(host) => client.through_to(host),
            None => client,
        })
    }

    /// Returns a client of the daemon that is asked first.
    fn direct_client(&self) -> Result<Client, Failure> {
        match self.address()? {
            Address::Socket(path) => {
                let given = [("--token-file", &self.token_file), ("--ca", &self.ca)];
                if let Some((option, _)) = given.iter().find(|(_, file)| file.is_some()) {
                    let socket = path.display();
                    return Err(Failure::usage(format!(
                        "{option} is for --socket https://HOST:PORT, and this asks {socket}: leave one of them out"
                    )));
                }
                let cannot = |e| Failure::new(Exit::Internal, format!("cannot ask spillwayd: {e}"));
                Client::new(&path).map_err(cannot)
            }
            Address::Remote(remote) => {
                let ca = variable(CA_VARIABLE).map(PathBuf::from);
                let ca = self.ca.as_ref().or(ca.as_ref());
                let token = self.token(&remote)?;
                Ok(Client::remote(remote, token, ca.map(PathBuf::as_path))?)
            }
        }
    }

    fn token(&self, remote: &HostPort) -> Result<Token, Failure> {
        match (&self.token_file, variable(TOKEN_VARIABLE)) {
            (Some(file), _) => Ok(Token::load(file)?),
            (None, Some(token)) => {
                let token = Token::new(token.to_str().unwrap_or_default());
                token.map_err(|e| Failure::usage(format!("{TOKEN_VARIABLE}: {e}")))
            }
            (None, None) => Err(Failure::usage(format!(
                "{remote} requires a token: give a token in {TOKEN_VARIABLE} or by --token-file FILE"
            ))),
        }
    }

    /// Shows a list in pages: as JSON, or as a table. At most the rows of one page are in memory, to compute the widths
    /// of the columns; for JSON nothing.
    pub fn show_pages<T: Serialize + DeserializeOwned, const N: usize>(
        &self,
        pages: Pages<'_, T>,
        columns: [&str; N],
        rows: impl Fn(&T) -> Vec<[String; N]>,
    ) -> Result<(), Failure> {
        if !self.json {
            let mut all = Vec::new();
            for page in pages {
                all.extend(page?.iter().flat_map(&rows));
            }
            return output::print(&table(columns, all)).map(drop);
        }
        let mut count = 0_u64;
        for page in pages {
            let page = page?;
            let mut text = if count == 0 { "{\n  \"items\": [".to_owned() } else { String::new() };
            for item in &page {
                text += if count == 0 { "\n" } else { ",\n" };
                let item = serde_json::to_string_pretty(item).expect("an answer is plain data");
                text += &item.lines().map(|line| format!("    {line}")).collect::<Vec<_>>().join("\n");
                count += 1;
            }
            if !output::print(&text)? {
                return Ok(());
            }
        }
        output::print(if count == 0 { "]\n}\n" } else { "\n  ]\n}\n" }).map(drop)
    }

    /// Shows a response as JSON or as text.
    pub fn show<T: Serialize>(&self, answer: &T, words: impl FnOnce(&T) -> String) -> Result<(), Failure> {
        self.shows(answer, words).map(drop)
    }

    /// Does the same. Returns `false` if nobody reads the output.
    pub fn shows<T: Serialize>(&self, answer: &T, words: impl FnOnce(&T) -> String) -> Result<bool, Failure> {
        let text = if self.json {
            format!("{}\n", serde_json::to_string_pretty(answer).expect("an answer is plain data"))
        } else {
            words(answer)
        };
        output::print(&text)
    }
}

/// Returns an environment variable that is not empty.
fn variable(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}
