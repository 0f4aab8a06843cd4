//! The screen of `spillway top`: what is chosen on it, its keys, its picture. Owns no figures.
//!
//! Invariant: any key at any time leaves a screen that can be drawn, on a terminal of any size.

use super::By;
use super::rows::{COLUMNS, Moments, Row, arrange};
use super::stream::StreamSummary;
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Paragraph, Table, TableState};
use spillway_control::bytes;
use std::io;
use std::time::Duration;

/// How long a look at the keys lasts.
const TURN: Duration = Duration::from_millis(200);
/// Between two columns.
const SPACE: u16 = 2;
/// From here on a write cache is nearly full, and critically so: the defaults of disks.
const WARN: f64 = 0.8;
const CRITICAL: f64 = 0.9;

/// What follows.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// Another look at the figures.
    Look,
    /// The end.
    End,
}

/// What is chosen.
pub struct Screen {
    by: By,
    column: usize,
    reverse: bool,
    filter: String,
    typing: bool,
    table: TableState,
    rows: usize,
    /// Why there are no newer figures.
    pub trouble: Option<String>,
}

impl Screen {
    pub fn new(by: By, column: usize, filter: &str) -> Screen {
        Screen {
            by,
            column,
            reverse: false,
            filter: filter.into(),
            typing: false,
            table: TableState::default().with_selected(0),
            rows: 0,
            trouble: None,
        }
    }

    /// Waits for a key, not for long.
    pub fn next(&mut self) -> io::Result<Next> {
        if event::poll(TURN)?
            && let Event::Key(key) = event::read()?
            && key.kind != KeyEventKind::Release
        {
            return Ok(self.press(key));
        }
        Ok(Next::Look)
    }

    fn press(&mut self, key: KeyEvent) -> Next {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c') if control => return Next::End,
            KeyCode::Esc if self.typing => (self.typing, self.filter) = (false, String::new()),
            KeyCode::Enter if self.typing => self.typing = false,
            KeyCode::Backspace if self.typing => _ = self.filter.pop(),
            KeyCode::Char(letter) if self.typing && !control => self.filter.push(letter),
            KeyCode::Char('q') | KeyCode::Esc if !self.typing => return Next::End,
            KeyCode::Char('/') => self.typing = true,
            KeyCode::Char('r') => self.reverse = !self.reverse,
            KeyCode::Char('c') | KeyCode::Tab => {
                self.by = if self.by == By::Machine { By::Catalog } else { By::Machine };
                self.table.select(Some(0));
            }
            KeyCode::Left => self.column = self.column.checked_sub(1).unwrap_or(COLUMNS.len() - 1),
            KeyCode::Right => self.column = (self.column + 1) % COLUMNS.len(),
            KeyCode::Up => self.step(-1),
            KeyCode::Down => self.step(1),
            KeyCode::PageUp => self.step(-20),
            KeyCode::PageDown => self.step(20),
            KeyCode::Home => self.step(isize::MIN),
            KeyCode::End => self.step(isize::MAX),
            _ => {}
        }
        Next::Look
    }

    fn step(&mut self, rows: isize) {
        let at = self.table.selected().unwrap_or(0).saturating_add_signed(rows);
        self.table.select(Some(at.min(self.rows.saturating_sub(1))));
    }

    pub fn draw(&mut self, frame: &mut Frame, moments: &Moments) {
        let mut rows = moments.rows(self.by);
        arrange(&mut rows, &self.filter, self.column, self.reverse);
        self.rows = rows.len();
        self.step(0);
        let lines = self.head(moments);
        let height = lines.len().max(2) as u16;
        let [head, body, foot] =
            Layout::vertical([Constraint::Length(height), Constraint::Min(0), Constraint::Length(1)])
                .areas(frame.area());
        frame.render_widget(Paragraph::new(lines), head);
        let columns = fitting(&rows, body.width);
        let title = |&column: &usize| {
            let mark = match (column == self.column, self.reverse) {
                (true, false) => "*",
                (true, true) => "-",
                _ => "",
            };
            Cell::from(format!("{}{mark}", COLUMNS[column].title()))
        };
        let header = ratatui::widgets::Row::new(columns.iter().map(|(column, _)| title(column)))
            .style(Style::new().add_modifier(Modifier::REVERSED));
        let lines = rows.iter().map(|row| {
            let cells = columns.iter().map(|(column, _)| Cell::from((COLUMNS[*column].text)(row)));
            ratatui::widgets::Row::new(cells).style(style(row))
        });
        let table = Table::new(lines, columns.iter().map(|(_, width)| Constraint::Length(*width)))
            .header(header)
            .column_spacing(SPACE)
            .row_highlight_style(Style::new().add_modifier(Modifier::BOLD | Modifier::UNDERLINED));
        frame.render_stateful_widget(table, body, &mut self.table);
        frame.render_widget(Paragraph::new(self.foot()), foot);
    }

    fn head(&self, moments: &Moments) -> Vec<Line<'static>> {
        let Some(figures) = moments.last() else { return Vec::new() };
        let sum = |of: fn(&spillway_api::CatalogFigures) -> u64| figures.catalogs.iter().map(of).sum::<u64>();
        let first = format!(
            "{}  {} running, {} failed, {} claimed  never reached a disk: {}",
            figures.time.strftime("%H:%M:%S UTC"),
            sum(|c| c.machines.running),
            sum(|c| c.machines.failed),
            sum(|c| c.machines.claimed),
            bytes(sum(|c| c.spared_bytes)),
        );
        let tiers = format!(
            "RAM {} of {}  overflow {}",
            bytes(sum(|c| c.levels.ram_used_bytes)),
            bytes(sum(|c| c.levels.ram_limit_bytes)),
            bytes(sum(|c| c.levels.overflow_used_bytes)),
        );
        let stores = figures.stores.iter().map(|store| format!("{} {}", store.name, bytes(store.free_bytes)));
        let second = match &self.trouble {
            Some(trouble) => Line::styled(trouble.clone(), Style::new().fg(Color::Red)),
            None => Line::raw(format!("{tiers}  free: {}", stores.collect::<Vec<_>>().join(", "))),
        };
        let stream = StreamSummary::of(moments).map(|stream| stream.lines().map(Line::raw));
        [Line::raw(first), second].into_iter().chain(stream.into_iter().flatten()).collect()
    }

    fn foot(&self) -> Line<'static> {
        if self.typing {
            return Line::from(vec![Span::raw("filter: "), Span::raw(self.filter.clone()), Span::raw("_")]);
        }
        let filter =
            if self.filter.is_empty() { String::new() } else { format!("  filter: {}", self.filter) };
        let other = if self.by == By::Machine { "catalogs" } else { "machines" };
        Line::raw(format!("q end  arrows choose, sort  r reverse  / filter  tab {other}{filter}"))
    }
}

/// The columns that fit, and how wide they are.
fn fitting(rows: &[Row], width: u16) -> Vec<(usize, u16)> {
    let mut left = width;
    let mut columns = Vec::new();
    for (at, column) in COLUMNS.iter().enumerate() {
        let widest = rows.iter().map(|row| (column.text)(row).chars().count()).max().unwrap_or(0);
        let wide = u16::try_from(widest.max(column.title().len() + 1)).unwrap_or(u16::MAX);
        if wide > left {
            break;
        }
        left = left.saturating_sub(wide.saturating_add(SPACE));
        columns.push((at, wide));
    }
    columns
}

fn style(row: &Row) -> Style {
    match row.fill {
        _ if row.levels.full > 0 || row.fill >= CRITICAL => Style::new().fg(Color::Red),
        fill if fill >= WARN => Style::new().fg(Color::Yellow),
        _ => Style::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::rows::tests::moment;
    use super::super::stream::tests::streamed;
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn moments() -> Moments {
        let mut moments = Moments::default();
        moments.add(moment(0, &[("desk-1", 0, 0), ("desk-2", 0, 0), ("other", 0, 0)]));
        moments.add(moment(1, &[("desk-1", 950, 5), ("desk-2", 10, 700), ("other", 20, 6)]));
        moments
    }

    fn picture(screen: &mut Screen, width: u16, height: u16) -> Vec<String> {
        picture_of(screen, &moments(), width, height)
    }

    fn picture_of(screen: &mut Screen, moments: &Moments, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| screen.draw(frame, moments)).unwrap();
        let cells = terminal.backend().buffer().content();
        cells
            .chunks(width.max(1).into())
            .map(|line| line.iter().map(|cell| cell.symbol()).collect())
            .collect()
    }

    fn press(screen: &mut Screen, code: KeyCode) -> Next {
        screen.press(KeyEvent::new(code, KeyModifiers::NONE))
    }

    #[test]
    fn keys_sort_filter_choose_and_end() {
        let mut screen = Screen::new(By::Machine, 2, "");
        let seen = picture(&mut screen, 200, 10);
        assert!(seen[0].contains("never reached a disk: 7 B"), "{seen:#?}");
        assert!(seen[2].contains("FILL*") && seen[2].contains("SPARED"), "{seen:#?}");
        assert!(seen[3].starts_with("desk-1") && seen[3].contains("95.0%"), "{seen:#?}");
        (0..3).for_each(|_| _ = press(&mut screen, KeyCode::Right));
        let seen = picture(&mut screen, 200, 10);
        assert!(seen[2].contains("WRITTEN/s*") && seen[3].starts_with("desk-2"), "{seen:#?}");
        press(&mut screen, KeyCode::Char('r'));
        assert!(picture(&mut screen, 200, 10)[3].starts_with("desk-1"));
        for letter in ['/', 'o', 't', 'q'] {
            press(&mut screen, KeyCode::Char(letter));
        }
        assert!(picture(&mut screen, 200, 10)[3].trim().is_empty(), "nothing is called so");
        press(&mut screen, KeyCode::Backspace);
        let seen = picture(&mut screen, 200, 10);
        assert!(seen[3].starts_with("other") && seen[9].contains("filter: ot"), "{seen:#?}");
        press(&mut screen, KeyCode::Esc);
        press(&mut screen, KeyCode::Tab);
        assert!(picture(&mut screen, 200, 10)[3].starts_with("desk "));
        assert_eq!(press(&mut screen, KeyCode::Char('q')), Next::End);
        let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(screen.press(control_c), Next::End);
    }

    #[test]
    fn what_matters_most_fits_into_80_columns() {
        let mut screen = Screen::new(By::Machine, 2, "");
        let seen = picture(&mut screen, 80, 10);
        assert!(seen[0].contains("never reached a disk: 7 B"), "{seen:#?}");
        for title in ["NAME", "STATE", "FILL", "FULL IN", "SPARED", "WRITTEN/s"] {
            assert!(seen[2].contains(title), "{title}: {seen:#?}");
        }
    }

    #[test]
    fn the_cache_of_streamed_images_has_two_lines_of_its_own() {
        let mut streaming = Moments::default();
        streaming.add(streamed(0, 0, [0; 4]));
        streaming.add(streamed(1, 300, [0, 10, 20, 30]));
        let mut screen = Screen::new(By::Machine, 2, "");
        let seen = picture_of(&mut screen, &streaming, 80, 10);
        assert!(seen[2].starts_with("stream cache 999.0 GiB of 1000.0 GiB  saved 330.0 MiB"), "{seen:#?}");
        assert_eq!(seen[3].trim_end(), "chunks/s  cache 300  seed 10  peer 20  store 30");
        assert!(seen[4].starts_with("NAME") && seen[5].starts_with("desk-1"), "{seen:#?}");
    }

    #[test]
    fn any_size_can_be_drawn() {
        let mut screen = Screen::new(By::Machine, 13, "");
        for (width, height) in [(1, 1), (5, 2), (20, 3), (80, 24), (300, 4)] {
            picture(&mut screen, width, height);
            for key in [KeyCode::Left, KeyCode::End, KeyCode::Home, KeyCode::PageDown] {
                press(&mut screen, key);
            }
        }
        let narrow = picture(&mut screen, 40, 8);
        assert!(narrow[2].contains("NAME") && !narrow[2].contains("WRITTEN"), "{narrow:#?}");
    }
}
