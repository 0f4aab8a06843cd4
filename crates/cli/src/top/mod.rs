//! `spillway top`: where the I/O of all machines goes, live. Owns the loop between the daemon's figures and the screen.
//!
//! Invariant: keys are answered whether or not the daemon is; what standard output is no terminal gets is a table, once.

mod rows;
mod screen;
mod stream;

use crate::error::{Exit, Failure};
use crate::host::Daemon;
use crate::output;
use clap::{Args, ValueEnum};
use rows::{COLUMNS, Column, Moments};
use screen::{Next, Screen};
use spillway_api::Figures;
use std::io::{self, IsTerminal};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;
use stream::StreamSummary;

/// What a row is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum By {
    /// A machine
    #[default]
    Machine,
    /// A catalog
    Catalog,
}

/// Options of `top`. No group: the command has its name already.
#[derive(Debug, Args)]
#[group(skip)]
pub struct Top {
    /// What a row is
    #[arg(long, value_enum, default_value_t)]
    by: By,
    /// Sorted by this column: its title, such as fill or written/s
    #[arg(long, value_name = "COLUMN", value_parser = column, default_value = "fill")]
    sort: usize,
    /// Only those with this text in their name, their catalog's or their state
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,
    /// Seconds between two measurements
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=3600))]
    interval: u16,
    /// Measure for one interval, print a table, and exit. The default if standard output is not a terminal, and with --json
    #[arg(long)]
    once: bool,
}

impl Top {
    /// The same with a row for each catalog.
    pub fn by_catalog(self) -> Top {
        Top { by: By::Catalog, ..self }
    }
}

fn column(title: &str) -> Result<usize, String> {
    rows::column(title).ok_or_else(|| {
        let titles: Vec<String> = COLUMNS.iter().map(|column| column.title().to_lowercase()).collect();
        format!("there is no such column: the columns are {}", titles.join(", "))
    })
}

/// Shows it.
pub fn top(daemon: &Daemon, args: &Top) -> Result<(), Failure> {
    let client = daemon.client()?;
    show(daemon, args, move || Ok::<Figures, Failure>(client.get("/v1/figures")?))
}

/// Shows figures that are asked for again and again.
pub fn show(
    daemon: &Daemon,
    args: &Top,
    ask: impl Fn() -> Result<Figures, Failure> + Send + 'static,
) -> Result<(), Failure> {
    let interval = Duration::from_secs(args.interval.into());
    let mut moments = Moments::default();
    // Who is not there is an error, not an empty screen.
    moments.add(ask()?);
    if args.once || daemon.json || !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        std::thread::sleep(interval);
        moments.add(ask()?);
        return output::print(&once(&moments, daemon.json, args)).map(drop);
    }
    let (tell, told) = mpsc::sync_channel(1);
    let (over, is_over) = mpsc::channel::<()>();
    std::thread::spawn(move || {
        while matches!(is_over.recv_timeout(interval), Err(RecvTimeoutError::Timeout)) {
            if tell.send(ask()).is_err() {
                return;
            }
        }
    });
    let mut screen = Screen::new(args.by, args.sort, &args.filter);
    let mut terminal = ratatui::try_init().map_err(no_terminal)?;
    let shown = loop {
        if let Err(e) = terminal.draw(|frame| screen.draw(frame, &moments)) {
            break Err(e);
        }
        match screen.next() {
            Ok(Next::Look) => {}
            Ok(Next::End) => break Ok(()),
            Err(e) => break Err(e),
        }
        match told.try_recv() {
            Ok(Ok(figures)) => {
                moments.add(figures);
                screen.trouble = None;
            }
            Ok(Err(failure)) => screen.trouble = Some(failure.message),
            Err(_) => {}
        }
    };
    ratatui::restore();
    drop(over);
    shown.map_err(no_terminal)
}

fn no_terminal(error: io::Error) -> Failure {
    Failure::new(Exit::Internal, format!("the terminal cannot be used: {error}: say --once"))
}

/// For scripts, and for those without a terminal.
fn once(moments: &Moments, json: bool, args: &Top) -> String {
    let mut rows = moments.rows(args.by);
    rows::arrange(&mut rows, &args.filter, args.sort, false);
    let stream = StreamSummary::of(moments);
    if json {
        let time = moments.last().map(|figures| figures.time.to_string());
        let value = serde_json::json!({ "time": time, "rows": rows, "stream": stream });
        return format!("{value:#}\n");
    }
    let titles = COLUMNS.each_ref().map(Column::title);
    let mut text = crate::host::table(
        titles.each_ref().map(String::as_str),
        rows.iter().map(|row| COLUMNS.each_ref().map(|column| (column.text)(row))),
    );
    for line in stream.iter().flat_map(StreamSummary::lines) {
        text.push_str(&line);
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use rows::tests::moment;
    use stream::tests::streamed;

    #[test]
    fn a_table_and_json_have_every_row() {
        let mut moments = Moments::default();
        moments.add(moment(0, &[("a", 0, 0), ("b", 0, 0)]));
        moments.add(moment(1, &[("a", 10, 0), ("b", 500, 2048)]));
        let args = Top { by: By::Machine, sort: 2, filter: String::new(), interval: 1, once: true };
        let table = once(&moments, false, &args);
        let lines: Vec<&str> = table.lines().collect();
        assert!(lines[0].starts_with("NAME") && lines[0].contains("FULL IN"), "{table}");
        assert!(
            lines[1].starts_with("b ") && lines[1].contains("50.0%") && lines[1].contains("2.0 KiB"),
            "{table}"
        );
        let json: serde_json::Value = serde_json::from_str(&once(&moments, true, &args)).unwrap();
        assert_eq!(
            (&json["rows"][0]["name"], &json["rows"][0]["rates"]["written_bytes"]),
            (&"b".into(), &2048.0.into())
        );
        assert!(json["stream"].is_null() && !table.contains("stream"), "{table}");
        assert!(column("such").unwrap_err().contains("written/s"));
    }
    #[test]
    fn the_cache_of_streamed_images_follows_the_table() {
        let mut moments = Moments::default();
        moments.add(streamed(0, 0, [0; 4]));
        moments.add(streamed(2, 4, [0, 0, 0, 10]));
        let args = Top { by: By::Machine, sort: 2, filter: String::new(), interval: 1, once: true };
        let table = once(&moments, false, &args);
        let last: Vec<&str> = table.lines().skip(2).collect();
        assert!(last[0].starts_with("stream cache 999.0 GiB of 1000.0 GiB  saved 4.0 MiB"), "{table}");
        assert_eq!(last[1], "chunks/s  cache 2  seed 0  peer 0  store 5");
        let json: serde_json::Value = serde_json::from_str(&once(&moments, true, &args)).unwrap();
        assert_eq!(json["stream"]["chunk_rates"]["store"], 5.0, "{json:#}");
    }
}
