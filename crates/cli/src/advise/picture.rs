//! The picture of `advise --svg`: what every size of the RAM tier sends to the overflow, reads back and keeps there.
//!
//! Owns the drawing and counts nothing. Invariant: all panels have one axis of sizes, and a mark lies on its curve.

use super::ram;
use plotters::prelude::*;
use spillway_advisor::curve::{Curve, Point};
use std::io;

/// One trace's curve.
pub struct Line<'a> {
    /// Whose.
    pub name: &'a str,
    /// What every size does.
    pub curve: &'a Curve,
    /// What it has of a budget.
    pub share_bytes: Option<u64>,
}

/// Why there is no picture.
pub type Error = DrawingAreaErrorKind<io::Error>;
type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
type Figure = fn(&Point) -> u64;

const WIDTH: u32 = 860;
const PANEL_HEIGHT: u32 = 250;
const ROW: i32 = 20;
const LEFT: i32 = 24;
/// Lines that are told apart, and named.
const COLOURS: [RGBColor; 8] = [
    RGBColor(31, 119, 180),
    RGBColor(214, 39, 40),
    RGBColor(44, 160, 44),
    RGBColor(148, 103, 189),
    RGBColor(255, 127, 14),
    RGBColor(23, 190, 207),
    RGBColor(140, 86, 75),
    RGBColor(227, 119, 194),
];
const NAME_CHARS: usize = 90;
const PANELS: [(&str, Figure); 3] = [
    ("evicted to the overflow", |p| p.overflow_write_bytes),
    ("read back from the overflow", |p| p.overflow_read_bytes),
    ("the most that lives in the overflow at a time", |p| p.peak_overflow_bytes),
];

/// A size that stands out on a curve.
#[derive(Clone, Copy)]
enum Mark {
    Recommended,
    Knee,
    Zero,
    Share,
}

impl Mark {
    const ALL: [Mark; 4] = [Mark::Recommended, Mark::Knee, Mark::Zero, Mark::Share];

    fn of(self, line: &Line) -> Option<u64> {
        match self {
            Mark::Recommended => Some(line.curve.recommended_bytes),
            Mark::Knee => line.curve.knee_bytes,
            Mark::Zero => Some(line.curve.zero_overflow_bytes),
            Mark::Share => line.share_bytes,
        }
    }

    fn says(self, lines: &[Line]) -> String {
        let goal = lines.first().map_or(0.0, |line| (line.curve.goal * 1e4).round() / 100.0);
        let what = match self {
            Mark::Recommended => format!("recommended, to absorb {goal}% of what is written"),
            Mark::Knee => "the knee".into(),
            Mark::Zero => "nothing overflows from here on".into(),
            Mark::Share => "its share of the budget".into(),
        };
        match lines {
            [line] => self.of(line).map_or(what.clone(), |bytes| format!("{what}: {}", ram(bytes))),
            _ => what,
        }
    }

    /// A sign of its own, for eyes that see no colours.
    fn sign<B: DrawingBackend, C: Clone + 'static>(
        self,
        at: C,
        colour: RGBColor,
    ) -> DynElement<'static, B, C> {
        let outline = colour.stroke_width(2);
        match self {
            Mark::Recommended => Circle::new(at, 5, colour.filled()).into_dyn(),
            Mark::Knee => TriangleMarker::new(at, 7, colour).into_dyn(),
            Mark::Zero => Cross::new(at, 5, outline).into_dyn(),
            Mark::Share => Circle::new(at, 8, outline).into_dyn(),
        }
    }
}

/// Draws these curves, as SVG.
pub fn svg(lines: &[Line]) -> Result<String, Error> {
    let named = lines.len().min(COLOURS.len());
    let marks: Vec<Mark> =
        Mark::ALL.into_iter().filter(|mark| lines.iter().any(|line| mark.of(line).is_some())).collect();
    let rows = named + usize::from(named < lines.len()) + marks.len();
    let head_height = 40 + ROW * rows as i32;
    let mut out = String::new();
    {
        let size = (WIDTH, head_height as u32 + PANEL_HEIGHT * PANELS.len() as u32);
        let root = SVGBackend::with_string(&mut out, size).into_drawing_area();
        root.fill(&WHITE)?;
        let (head, body) = root.split_vertically(head_height);
        draw_head(&head, lines, &marks)?;
        for (area, (title, figure)) in body.split_evenly((PANELS.len(), 1)).iter().zip(PANELS) {
            draw_panel(area, title, figure, lines, &marks)?;
        }
        root.present()?;
    }
    Ok(out)
}

/// The title, and what lines and marks are.
fn draw_head(area: &Area, lines: &[Line], marks: &[Mark]) -> Result<(), Error> {
    let font = |size: i32| ("sans-serif", size).into_font();
    let title = "The overflow at every size of the RAM tier (lower is better)";
    area.draw(&Text::new(title, (LEFT, 12), font(20)))?;
    let mut y = 40;
    let mut row = |words: String, sign: Option<DynElement<'_, _, _>>| {
        sign.iter().try_for_each(|sign| area.draw(sign))?;
        area.draw(&Text::new(words, (LEFT + 30, y), font(15)))?;
        y += ROW;
        Ok::<i32, Error>(y)
    };
    let mut middle = 47;
    for (line, colour) in lines.iter().zip(COLOURS) {
        let dash = PathElement::new([(LEFT, middle), (LEFT + 22, middle)], colour.stroke_width(3));
        middle = row(shown(line.name), Some(dash.into_dyn()))? + 7;
    }
    if lines.len() > COLOURS.len() {
        let more = lines.len() - COLOURS.len();
        middle = row(format!("and {more} more, in the same colours again"), None)? + 7;
    }
    for mark in marks {
        middle = row(mark.says(lines), Some(mark.sign((LEFT + 11, middle), BLACK)))? + 7;
    }
    Ok(())
}

fn draw_panel(area: &Area, title: &str, figure: Figure, lines: &[Line], marks: &[Mark]) -> Result<(), Error> {
    let sizes = lines.iter().flat_map(|line| {
        let points = line.curve.curve.iter().map(|p| p.ram_bytes);
        points.chain(marks.iter().filter_map(|mark| mark.of(line)))
    });
    let figures = lines.iter().flat_map(|line| line.curve.curve.iter().map(figure));
    let (x_axis, y_axis) = (Axis::to(sizes.max()), Axis::to(figures.max()));
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 17))
        .margin(10)
        .margin_right(30)
        .x_label_area_size(42)
        .y_label_area_size(84)
        .build_cartesian_2d(0.0..x_axis.end, 0.0..y_axis.end)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .y_labels(6)
        .x_desc("RAM tier")
        .x_label_formatter(&|x| x_axis.says(*x))
        .y_label_formatter(&|y| y_axis.says(*y))
        .label_style(("sans-serif", 14))
        .draw()?;
    for (line, colour) in lines.iter().zip(COLOURS.into_iter().cycle()) {
        let place = |(ram, bytes): (u64, f64)| (x_axis.place(ram as f64), y_axis.place(bytes));
        let points = line.curve.curve.iter().map(|p| place((p.ram_bytes, figure(p) as f64)));
        // Of several, what lies under each would hide the others.
        let under = if lines.len() == 1 { colour.mix(0.12) } else { TRANSPARENT };
        let series = AreaSeries::new(points, 0.0, under).border_style(colour.stroke_width(2));
        chart.draw_series(series)?;
        let found = marks.iter().filter_map(|mark| mark.of(line).map(|bytes| (mark, bytes)));
        chart
            .draw_series(found.map(|(mark, bytes)| {
                mark.sign(place((bytes, at(&line.curve.curve, bytes, figure))), colour)
            }))?;
    }
    Ok(())
}

/// What a curve says of a size, between two of its points by a straight line, as it is drawn.
fn at(points: &[Point], ram_bytes: u64, figure: Figure) -> f64 {
    let i = points.partition_point(|p| p.ram_bytes < ram_bytes);
    match (i.checked_sub(1).and_then(|i| points.get(i)), points.get(i)) {
        (Some(below), Some(above)) => {
            let share = (ram_bytes - below.ram_bytes) as f64 / (above.ram_bytes - below.ram_bytes) as f64;
            let (from, to) = (figure(below) as f64, figure(above) as f64);
            from + (to - from) * share
        }
        (Some(end), None) | (None, Some(end)) => figure(end) as f64,
        (None, None) => 0.0,
    }
}

/// From 0 to the most of its bytes, in a unit that has few digits.
struct Axis {
    unit: (f64, &'static str),
    end: f64,
}

impl Axis {
    fn to(most: Option<u64>) -> Axis {
        let most = most.unwrap_or(0).max(1) as f64;
        let units =
            [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")].map(|(n, unit)| ((1u64 << n) as f64, unit));
        let unit = units.into_iter().find(|(bytes, _)| most >= *bytes).unwrap_or((1.0, "bytes"));
        Axis { unit, end: most / unit.0 * 1.05 }
    }

    fn place(&self, bytes: f64) -> f64 {
        bytes / self.unit.0
    }

    fn says(&self, place: f64) -> String {
        let digits = format!("{place:.2}");
        format!("{} {}", digits.trim_end_matches('0').trim_end_matches('.'), self.unit.1)
    }
}

/// A name as XML can hold it, and not wider than the picture: its end says most.
fn shown(name: &str) -> String {
    let forbidden = |c: char| c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}');
    let chars: Vec<char> = name.chars().map(|c| if forbidden(c) { '?' } else { c }).collect();
    match chars.len().checked_sub(NAME_CHARS) {
        None | Some(0) => chars.into_iter().collect(),
        Some(more) => std::iter::once('…').chain(chars.into_iter().skip(more + 1)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_advisor::lru::Lru;
    use spillway_advisor::{BLOCK_BYTES, Event, Operation};

    /// Many blocks once, some of them again and again.
    fn curve(blocks: u64) -> Curve {
        let mut lru = Lru::new(u64::MAX);
        for i in 0..4 * blocks {
            let block = if i % 2 == 0 { i / 2 % blocks } else { i * i % (blocks / 8) };
            let operation = if i % 5 == 4 { Operation::Read } else { Operation::Write };
            let (offset_bytes, len_bytes) = (block * BLOCK_BYTES, BLOCK_BYTES);
            lru.event(&Event { time_us: i, operation, offset_bytes, len_bytes });
        }
        Curve::new(&lru.profile(), 0.95)
    }

    fn attribute<'a>(tag: &'a str, name: &str) -> &'a str {
        let begin = tag.find(&format!(" {name}=\"")).unwrap() + name.len() + 3;
        tag[begin..].split('"').next().unwrap()
    }

    /// What begins so, each with its attributes.
    fn elements<'a>(svg: &'a str, name: &str) -> Vec<&'a str> {
        svg.match_indices(&format!("<{name} ")).map(|(i, _)| svg[i..].split('>').next().unwrap()).collect()
    }

    /// Each element ends where it should, and nothing is said that XML does not have.
    fn check_form(svg: &str) {
        let mut open = Vec::new();
        for (i, part) in svg.split('<').enumerate() {
            assert!(!part.contains(|c: char| c.is_control() && c != '\n'), "{part:?}");
            assert!(
                part.match_indices('&')
                    .all(|(at, _)| part[at..].split_once(';').is_some_and(|(e, _)| e.len() < 6))
            );
            if i == 0 {
                assert_eq!(part, "");
                continue;
            }
            let (tag, _) = part.split_once('>').unwrap();
            assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
            match tag.strip_prefix('/') {
                Some(name) => assert_eq!(open.pop(), Some(name)),
                None if tag.ends_with('/') => {}
                None => open.push(tag.split(' ').next().unwrap()),
            }
        }
        assert!(open.is_empty() && svg.starts_with("<svg "), "{open:?}");
    }

    #[test]
    fn higher_figures_lie_higher_and_marks_on_their_curve() {
        let curve = curve(20_000);
        let svg = svg(&[Line { name: "vm1.trace", curve: &curve, share_bytes: None }]).unwrap();
        check_form(&svg);
        let lines: Vec<Vec<(i32, i32)>> = elements(&svg, "polyline")
            .into_iter()
            .map(|tag| {
                let places = attribute(tag, "points").split_whitespace();
                places
                    .map(|p| {
                        p.split_once(',').map(|(x, y)| (x.parse().unwrap(), y.parse().unwrap())).unwrap()
                    })
                    .collect()
            })
            .filter(|places: &Vec<_>| places.len() == curve.curve.len())
            .collect();
        assert_eq!(lines.len(), PANELS.len());
        for (places, (title, figure)) in lines.iter().zip(PANELS) {
            assert!(svg.contains(title));
            let figures: Vec<u64> = curve.curve.iter().map(figure).collect();
            let all = || places.iter().zip(&figures);
            for ((a, of_a), (b, of_b)) in all().zip(all().skip(1)) {
                assert!(a.0 <= b.0 && (a.1 <= b.1) == (of_a >= of_b) || a.1 == b.1, "{title}: {a:?} {b:?}");
            }
            assert!(places[0].1 + 100 < places[places.len() - 1].1, "{title}: {places:?}");
        }
        // In each panel and in the head: where the recommendation is, the curve is too.
        let circles = elements(&svg, "circle");
        assert_eq!((circles.len(), elements(&svg, "polygon").len()), (4, 4 + PANELS.len()));
        for (circle, places) in circles[1..].iter().zip(&lines) {
            let [x, y]: [i32; 2] = ["cx", "cy"].map(|name| attribute(circle, name).parse().unwrap());
            let i = curve.curve.partition_point(|p| p.ram_bytes < curve.recommended_bytes).max(1);
            assert!((places[i - 1].0..=places[i].0).contains(&x), "{circle} {places:?}");
            assert!((places[i - 1].1..=places[i].1).contains(&y), "{circle} {places:?}");
        }
        let knee = format!("the knee: {}", ram(curve.knee_bytes.unwrap()));
        let goal = format!("95% of what is written: {}", ram(curve.recommended_bytes));
        let zero = format!("from here on: {}", ram(curve.zero_overflow_bytes));
        assert!([knee, goal, zero].iter().all(|words| svg.contains(words)), "{svg}");
    }

    #[test]
    fn several_share_their_axes_and_no_name_breaks_out() {
        let curves: Vec<Curve> = (1..=10).map(|n| curve(n * 1000)).collect();
        let name = "<desk>\u{1}&\"'".to_owned() + &"x".repeat(200);
        let lines: Vec<Line> =
            curves.iter().map(|curve| Line { name: &name, curve, share_bytes: Some(1 << 20) }).collect();
        let svg = svg(&lines).unwrap();
        check_form(&svg);
        assert!(!svg.contains("<desk>") && svg.contains("and 2 more"));
        // The recommendation and the share, of each in each panel, and both in the head.
        assert_eq!(elements(&svg, "circle").len(), 2 * (10 * PANELS.len() + 1));
    }

    #[test]
    fn a_trace_that_writes_nothing_is_drawn() {
        let curve = Curve::new(&Lru::new(u64::MAX).profile(), 0.95);
        let svg = svg(&[Line { name: "-", curve: &curve, share_bytes: None }]).unwrap();
        check_form(&svg);
        assert!(!svg.contains("NaN") && !svg.contains("inf") && !svg.contains("the knee"), "{svg}");
    }

    #[test]
    fn an_axis_has_few_digits() {
        let says = |most: u64, place: f64| Axis::to(Some(most)).says(place);
        assert_eq!(says(5 << 30, 2.0), "2 GiB");
        assert_eq!(says(5 << 30, 0.30000000000000004), "0.3 GiB");
        assert_eq!((says(1000, 100.0), says(0, 0.0)), ("100 bytes".into(), "0 bytes".into()));
    }
}
