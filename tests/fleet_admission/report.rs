//! What the long run writes: a page and a picture of slots over time.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use crate::stage::*;

/// What is measured beside what is seen.
pub struct Figures {
    /// Until slots for 85 % of a burst on one of the idle gateways were its own, and until the requests were in the engines.
    pub burst: [Duration; 2],
    /// Share of all slots in use while nothing fails.
    pub calm: f64,
    /// Until the floating slots of a dead gateway served others, and how many slots stayed its own.
    pub floating: Duration,
    pub anchored: usize,
    /// After another process of it was started, until it all was in use again.
    pub replaced: Duration,
    /// Requests a second before the control plane was stopped and while it was.
    pub rates: [f64; 2],
    /// Share of all slots in use while the control plane was stopped and nothing floated.
    pub alone: f64,
    /// The most requests that one engine ever had.
    pub peak: usize,
    /// Requests answered, and shed.
    pub served: u64,
    pub shed: usize,
}

const PAGE: &str = "docs/reports/admission.md";
const PICTURE: &str = "docs/reports/admission.svg";
/// What follows on the page from here on is of other runs, and kept.
const KEPT: &str = "## The ledger alone";

/// Writes the page and the picture.
pub fn write(seen: &Seen, figures: &Figures) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let before = std::fs::read_to_string(root.join(PAGE)).unwrap_or_default();
    let kept = before.find(KEPT).map_or("", |at| &before[at..]);
    std::fs::write(root.join(PAGE), format!("{}{kept}", page(seen, figures))).unwrap();
    std::fs::write(root.join(PICTURE), picture(seen)).unwrap();
}

fn page(seen: &Seen, figures: &Figures) -> String {
    let seconds = |time: Duration| format!("{:.2} s", time.as_secs_f64());
    let minutes = seen.moments.last().map_or(0, |moment| moment.at.as_secs() / 60);
    let build = if cfg!(debug_assertions) { "debug" } else { "release" };
    let processors = std::thread::available_parallelism().map_or(0, usize::from);
    let rows = [
        (format!("most requests that one engine ever had, of {WINDOW}"), figures.peak.to_string()),
        (
            "slots in use while demand is three times what there is and nothing fails".to_owned(),
            format!("{:.1} %", figures.calm * 100.0),
        ),
        (
            "a burst on one of four idle gateways: until 85 % of what the others leave is its own".to_owned(),
            seconds(figures.burst[0]),
        ),
        ("until so many of its requests are in the engines".to_owned(), seconds(figures.burst[1])),
        (
            format!(
                "a gateway is killed: until its floating slots serve others ({} stay its own, anchored)",
                figures.anchored
            ),
            seconds(figures.floating),
        ),
        ("it is started again: until 95 % of all slots are in use".to_owned(), seconds(figures.replaced)),
        (
            "requests a second in the minute before the control plane is stopped".to_owned(),
            format!("{:.1}", figures.rates[0]),
        ),
        (
            "in the two minutes without it".to_owned(),
            format!("{:.1}, {:.0} %", figures.rates[1], 100.0 * figures.rates[1] / figures.rates[0]),
        ),
        ("slots in use there once nothing floats any more".to_owned(), format!("{:.1} %", figures.alone * 100.0)),
        (
            "requests answered; shed, with 503 and `Retry-After`".to_owned(),
            format!("{}; {}", figures.served, figures.shed),
        ),
        ("other failures, but for the clients of the killed gateway while it was gone".to_owned(), "0".to_owned()),
    ];
    let mut text = format!(
        "# One window for many gateways\n\n\
         The last run of the fleet of real processes (`make admission`; `tests/fleet_admission`): four gateways, three members of the\n\
         control plane, three gRPC decode engines that run {WINDOW} requests each, one prefill engine; {minutes} minutes; {build} build; all on\n\
         one machine with {processors} processors. An answer takes six seconds. The run fails if an engine gets more than its window, a\n\
         request fails in any other way than by a shed, less than 95 % of the slots are in use while nothing fails, or less than 60 % of\n\
         the requests are served without a control plane. What it shows is explained in [admission](../concepts/admission.md).\n\n\
         ![slots in use and granted over time](admission.svg)\n\n| what | measured |\n|---|---|\n"
    );
    for (what, measured) in rows {
        let _ = writeln!(text, "| {what} | {measured} |");
    }
    text += "\n## What was done\n\n| | second | |\n|---|---|---|\n";
    for (number, (at, what)) in seen.notes.iter().enumerate() {
        let _ = writeln!(text, "| {} | {:.0} | {what} |", number + 1, at.as_secs_f64());
    }
    text += "\nIn the picture a gateway that is frozen or dead says nothing of its slots. Just after a change the sum may seem to be\n\
             above the window: what two gateways say is up to a second old.\n\n";
    text
}

const COLOURS: [&str; GATEWAYS.len()] = ["#9ecae1", "#a1d99b", "#fdd0a2", "#dadaeb"];
const WIDTH: f64 = 900.0;
const LEFT: f64 = 50.0;

fn picture(seen: &Seen) -> String {
    let end = seen.moments.last().map_or(1.0, |moment| moment.at.as_secs_f64());
    let x = |at: Duration| LEFT + WIDTH * at.as_secs_f64() / end;
    // Two panels: all engines together, and each.
    let together = |slots: f64| 270.0 - 230.0 * slots / ALL as f64;
    let each = |slots: f64| 420.0 - 110.0 * slots / WINDOW as f64;
    let mut svg = String::from(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 1000 450\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"1000\" height=\"450\" fill=\"white\"/>\n",
    );
    let mut under = vec![0.0; seen.said.len()];
    for (gateway, colour) in COLOURS.iter().enumerate() {
        let over: Vec<f64> =
            seen.said.iter().zip(&under).map(|(said, under)| under + said.granted[gateway].unwrap_or(0.0)).collect();
        let point = |(said, slots): (&Said, &f64)| format!("{:.1},{:.1} ", x(said.at), together(*slots));
        let upper: String = seen.said.iter().zip(&over).map(point).collect();
        let lower: String = seen.said.iter().zip(&under).rev().map(point).collect();
        let _ = writeln!(svg, "<polygon points=\"{}{}\" fill=\"{colour}\"/>", upper, lower.trim_end());
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"14\"><tspan fill=\"{colour}\">■</tspan> granted to {}</text>",
            50 + 110 * gateway,
            GATEWAYS[gateway]
        );
        under = over;
    }
    let zombies: String = seen
        .said
        .iter()
        .filter_map(|said| Some(format!("{:.1},{:.1} ", x(said.at), together(said.zombies?))))
        .collect();
    line(&mut svg, &zombies, "#d62728", 1.0);
    let seconds = end as u64;
    let of_second = |second: u64, of: &dyn Fn(&Moment) -> f64| -> Vec<f64> {
        seen.moments.iter().filter(|moment| moment.at.as_secs() == second).map(of).collect()
    };
    let mean = |second| {
        let all = of_second(second, &|moment| moment.active.iter().sum::<usize>() as f64);
        all.iter().sum::<f64>() / all.len().max(1) as f64
    };
    let active: String = (0..seconds)
        .map(|second| format!("{:.1},{:.1} ", x(Duration::from_secs(second)), together(mean(second))))
        .collect();
    line(&mut svg, &active, "black", 1.2);
    let _ = writeln!(
        svg,
        "<text x=\"500\" y=\"14\">— in use</text><text x=\"570\" y=\"14\" fill=\"#d62728\">— kept for the silent (zombies)</text>"
    );
    for engine in 0..ENGINES {
        let most = |second| of_second(second, &|moment| moment.active[engine] as f64).into_iter().fold(0.0, f64::max);
        let points: String = (0..seconds)
            .map(|second| format!("{:.1},{:.1} ", x(Duration::from_secs(second)), each(most(second))))
            .collect();
        line(&mut svg, &points, ["#1f77b4", "#2ca02c", "#ff7f0e"][engine % 3], 1.0);
    }
    for (y, what) in [(together(ALL as f64), ALL), (together(0.0), 0), (each(WINDOW as f64), WINDOW), (each(0.0), 0)] {
        let _ = writeln!(
            svg,
            "<line x1=\"{LEFT}\" y1=\"{y}\" x2=\"{}\" y2=\"{y}\" stroke=\"grey\" stroke-dasharray=\"4 3\"/>",
            LEFT + WIDTH
        );
        let _ = writeln!(svg, "<text x=\"44\" y=\"{}\" text-anchor=\"end\">{what}</text>", y + 4.0);
    }
    let _ = writeln!(svg, "<text x=\"50\" y=\"305\">most requests in each engine, second by second</text>");
    for (number, (at, _)) in seen.notes.iter().enumerate() {
        let x = x(*at);
        let _ = writeln!(
            svg,
            "<line x1=\"{x:.1}\" y1=\"30\" x2=\"{x:.1}\" y2=\"420\" stroke=\"grey\" stroke-width=\"0.5\"/>"
        );
        let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"28\" font-size=\"9\">{}</text>", number + 1);
    }
    for second in (0..=seconds).step_by(60) {
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"438\" text-anchor=\"middle\">{second} s</text>",
            x(Duration::from_secs(second))
        );
    }
    svg + "</svg>\n"
}

fn line(svg: &mut String, points: &str, colour: &str, width: f64) {
    let _ = writeln!(
        svg,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\"/>",
        points.trim_end()
    );
}
