//! The picture over time: a line for each scenario, in its band.
//!
//! Invariant: where nothing is known nothing is drawn; the legend stands over the data, never on it.

use super::figures::Spread;
use super::numbers::{decades, number, tick, ticks, times};
use super::svg::{Picture, Role, cut, with_roles};
use anyhow::Result;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Twice what it is shown in: the backend draws in whole units.
const WIDTH: u32 = 1000;
/// Height of the words.
pub const TEXT: u32 = 26;
/// The widest that one character of [`TEXT`] is, on the mean of a word.
pub const CHARACTER: i32 = 16;
const HEIGHT: u32 = 560;
const ROW: i32 = 40;
/// Marks on each line.
const MARKS: usize = 6;

/// Where a picture is drawn.
pub type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

/// One scenario.
pub struct Line<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its place in the study: its colour and its mark.
    pub place: usize,
    /// By time.
    pub points: Vec<Option<Spread>>,
}

/// Draws them. `step` seconds lie between two points.
pub fn draw(label: &str, unit: &str, step: usize, lines: &[Line]) -> Result<Picture> {
    let legend = legend(lines);
    let head = 44 + ROW * legend.last().map_or(0, |entry| entry.row + 1);
    let (width, height) = (WIDTH, HEIGHT + head as u32);
    let mut drawn = String::new();
    {
        let root = SVGBackend::with_string(&mut drawn, (width, height)).into_drawing_area();
        let scale = Axis::of(lines);
        words(&root, &format!("{unit}{}", scale.note()), (8, 22), Role::Ink, HPos::Left)?;
        for entry in &legend {
            let y = 44 + ROW * entry.row + ROW / 2;
            let colour = Role::Series(entry.place).colour();
            root.draw(&PathElement::new(vec![(entry.x, y), (entry.x + 56, y)], colour.stroke_width(5)))?;
            mark(&root, (entry.x + 28, y), entry.place)?;
            words(&root, &entry.name, (entry.x + 68, y), Role::Ink, HPos::Left)?;
        }
        plot(&root, head, step, &scale, lines)?;
        root.present()?;
    }
    Ok(Picture { label: label.into(), width, height, body: inside(&drawn) })
}

/// What stands between the backend's own begin and end of a picture.
pub fn inside(drawn: &str) -> String {
    let body = drawn.split_once(">\n").map_or("", |(_, body)| body);
    with_roles(body.trim_end().trim_end_matches("</svg>"))
}

/// Words at a place, in the middle of their height.
pub fn words(root: &Area, text: &str, at: (i32, i32), role: Role, side: HPos) -> Result<()> {
    let style = ("sans-serif", f64::from(TEXT) * 1.24).into_font().color(&role.colour());
    root.draw(&Text::new(text.to_string(), at, style.pos(Pos::new(side, VPos::Center))))?;
    Ok(())
}

fn plot(root: &Area, head: i32, step: usize, scale: &Axis, lines: &[Line]) -> Result<()> {
    let length = lines.iter().map(|line| line.points.len()).max().unwrap_or(0);
    let end = (length * step).max(1) as f64;
    let (low, high) = (scale.marks[0], scale.marks[scale.marks.len() - 1]);
    let labels = scale.marks.iter().map(|mark| scale.write(*mark).chars().count()).max().unwrap_or(1);
    let mut chart = ChartBuilder::on(root)
        .margin_top(head + 14)
        .margin_right(34)
        .margin_left(labels as i32 * CHARACTER + 26)
        .margin_bottom(92)
        .build_cartesian_2d(0.0..end, low..high)?;
    let grid = Role::Grid.colour().stroke_width(2);
    for &mark in &scale.marks {
        let (from, to) = (chart.backend_coord(&(0.0, mark)), chart.backend_coord(&(end, mark)));
        root.draw(&PathElement::new(vec![from, to], grid))?;
        words(root, &scale.write(mark), (from.0 - 14, from.1), Role::Soft, HPos::Right)?;
    }
    let (marks, unit, name) = times(end);
    for mark in marks {
        let (x, y) = chart.backend_coord(&(mark, low));
        root.draw(&PathElement::new(vec![(x, y), (x, y + 10)], grid))?;
        words(root, &number(mark / unit), (x, y + 28), Role::Soft, HPos::Center)?;
    }
    let (x, y) = chart.backend_coord(&(end / 2.0, low));
    words(root, &format!("time, {name}"), (x, y + 66), Role::Soft, HPos::Center)?;
    let middle = |i: usize| (i as f64 + 0.5) * step as f64;
    for line in lines {
        let colour = Role::Series(line.place).colour();
        for run in stretches(&line.points, scale) {
            let low = run.iter().map(|(i, spread)| (middle(*i), scale.place(spread.low)));
            let high = run.iter().rev().map(|(i, spread)| (middle(*i), scale.place(spread.high)));
            if run.iter().any(|(_, spread)| spread.runs > 1) {
                let band: Vec<(f64, f64)> = low.chain(high).collect();
                chart.draw_series([Polygon::new(band, colour.mix(0.18))])?;
            }
        }
    }
    for (nth, line) in lines.iter().enumerate() {
        let colour = Role::Series(line.place).colour();
        for run in stretches(&line.points, scale) {
            let places: Vec<(f64, f64)> =
                run.iter().map(|(i, spread)| (middle(*i), scale.place(spread.mean))).collect();
            if let [only] = places[..] {
                mark(root, chart.backend_coord(&only), line.place)?;
            }
            chart.draw_series(LineSeries::new(places, colour.stroke_width(4)))?;
        }
        // Each line's marks are elsewhere, so that lines that lie on one another can be told apart.
        for k in 0..MARKS {
            let share = (k as f64 + (nth as f64 + 0.5) / lines.len() as f64) / MARKS as f64;
            let i = (share * line.points.len() as f64) as usize;
            let point = line.points.get(i).copied().flatten().filter(|spread| scale.has(spread));
            if let Some(spread) = point {
                mark(root, chart.backend_coord(&(middle(i), scale.place(spread.mean))), line.place)?;
            }
        }
    }
    Ok(())
}

/// Points that follow each other without a gap.
fn stretches(points: &[Option<Spread>], scale: &Axis) -> Vec<Vec<(usize, Spread)>> {
    let mut all = vec![Vec::new()];
    for (i, point) in points.iter().enumerate() {
        match (point.filter(|spread| scale.has(spread)), all.last_mut()) {
            (Some(spread), Some(last)) => last.push((i, spread)),
            _ => all.push(Vec::new()),
        }
    }
    all.retain(|run| !run.is_empty());
    all
}

/// The form of a scenario's mark.
pub fn mark(root: &Area, (x, y): (i32, i32), place: usize) -> Result<()> {
    let colour = Role::Series(place).colour();
    let corners = |offsets: &[(i32, i32)]| {
        Polygon::new(offsets.iter().map(|(dx, dy)| (x + dx, y + dy)).collect::<Vec<_>>(), colour)
    };
    match place % 7 {
        0 => root.draw(&Circle::new((x, y), 9, colour.filled()))?,
        1 => root.draw(&corners(&[(-9, -9), (9, -9), (9, 9), (-9, 9)]))?,
        2 => root.draw(&corners(&[(0, -12), (11, 9), (-11, 9)]))?,
        3 => root.draw(&corners(&[(0, -13), (11, 0), (0, 13), (-11, 0)]))?,
        4 => root.draw(&corners(&[(0, 12), (11, -9), (-11, -9)]))?,
        5 => root.draw(&corners(&[(-5, -12), (5, -12), (5, 12), (-5, 12)]))?,
        _ => root.draw(&Circle::new((x, y), 10, colour.stroke_width(4)))?,
    }
    Ok(())
}

struct Entry {
    name: String,
    place: usize,
    x: i32,
    row: i32,
}

/// Names side by side, in as many rows as they need.
fn legend(lines: &[Line]) -> Vec<Entry> {
    let (mut x, mut row) = (8, 0);
    let mut entries = Vec::new();
    for line in lines {
        let name = cut(line.name, 54);
        let width = 68 + name.chars().count() as i32 * CHARACTER + 30;
        if x > 8 && x + width > WIDTH as i32 {
            (x, row) = (8, row + 1);
        }
        entries.push(Entry { name, place: line.place, x, row });
        x += width;
    }
    entries
}

/// How values are placed: from 0 on, or by powers of ten where scenarios lie too far apart to be seen together.
struct Axis {
    marks: Vec<f64>,
    by_tens: bool,
}

impl Axis {
    fn of(lines: &[Line]) -> Axis {
        let all = || lines.iter().flat_map(|line| line.points.iter().flatten());
        let most = all().map(|spread| spread.high).fold(0.0, f64::max);
        let mean = |line: &Line| {
            let known: Vec<f64> = line.points.iter().flatten().map(|spread| spread.mean).collect();
            (!known.is_empty()).then(|| known.iter().sum::<f64>() / known.len() as f64)
        };
        let least = lines.iter().filter_map(mean).fold(f64::INFINITY, f64::min);
        let zeros = all().filter(|spread| spread.low <= 0.0).count();
        let by_tens = least > 0.0 && most > 300.0 * least && zeros * 20 <= all().count();
        if !by_tens {
            return Axis { marks: ticks(most), by_tens };
        }
        let lowest = all().map(|spread| spread.low).filter(|low| *low > 0.0).fold(f64::INFINITY, f64::min);
        // One slow second must not take half of the picture.
        let marks = decades(lowest.max(least / 100.0), most).into_iter().map(f64::from).collect();
        Axis { marks, by_tens }
    }

    fn note(&self) -> &'static str {
        if self.by_tens { " (each mark is a power of ten)" } else { "" }
    }

    fn has(&self, spread: &Spread) -> bool {
        !self.by_tens || spread.mean > 0.0
    }

    fn place(&self, value: f64) -> f64 {
        let (low, high) = (self.marks[0], self.marks[self.marks.len() - 1]);
        (if self.by_tens { value.max(1e-300).log10() } else { value }).clamp(low, high)
    }

    fn write(&self, mark: f64) -> String {
        let step = self.marks[1] - self.marks[0];
        if self.by_tens {
            let value = 10f64.powf(mark);
            return tick(value, value);
        }
        tick(mark, step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line<'a>(name: &'a str, place: usize, values: &[Option<f64>]) -> Line<'a> {
        let spread = |v: f64| Spread { mean: v, low: v * 0.9, high: v * 1.1, runs: 2 };
        Line { name, place, points: values.iter().map(|v| v.map(spread)).collect() }
    }

    #[test]
    fn gaps_break_lines_and_bands() {
        let lines = [line("a", 1, &[Some(1.0), Some(2.0), None, Some(3.0), Some(4.0), None, Some(1.0)])];
        let svg = draw("t", "reads/s", 1, &lines).unwrap().body;
        let with = |class: &str, tag: &str| {
            svg.lines().filter(|l| l.contains(class) && l.starts_with(&format!("<{tag} "))).count()
        };
        // Two lines and the legend's; three bands are filled.
        assert_eq!(with("l-s1", "polyline"), 4, "{svg}");
        assert!(svg.contains("opacity=\"0.18\" fill=\"#0072B2\" class=\"f-s1\""), "{svg}");
        assert!(!svg.contains("NaN") && !svg.contains("<script"));
    }

    #[test]
    fn one_run_has_no_band() {
        let mut only = line("<script>", 0, &[Some(1.0), Some(2.0)]);
        only.points.iter_mut().flatten().for_each(|spread| spread.runs = 1);
        let svg = draw("t", "reads/s", 1, &[only]).unwrap().body;
        assert!(!svg.contains("0.18") && svg.contains("&lt;script&gt;"), "{svg}");
    }

    #[test]
    fn scenarios_far_apart_are_shown_by_powers_of_ten() {
        let far = [line("a", 0, &[Some(459.0); 9]), line("b", 1, &[Some(400_000.0); 9])];
        assert!(Axis::of(&far).by_tens);
        let zero = [line("a", 0, &[Some(0.0); 9]), line("b", 1, &[Some(400_000.0); 9])];
        assert!(!Axis::of(&zero).by_tens);
        assert!(!Axis::of(&[line("a", 0, &[])]).by_tens);
        for lines in [&far[..], &zero[..], &[]] {
            draw("t", "x", 7, lines).unwrap();
        }
    }
}
