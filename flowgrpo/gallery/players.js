
// Videos play without sound while they are in view. A video that a person has stopped stays stopped.
const calm = window.matchMedia("(prefers-reduced-motion: reduce)");
const watched = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!target.isConnected) watched.unobserve(target);
    else if (isIntersecting && target.wanted) target.play().catch(() => { target.wanted = false; });
    else if (!isIntersecting && !target.paused) {
      target.wanted = true;
      target.leaving = true;
      target.pause();
    }
  }
}, { rootMargin: "80px" });

// A video that repeats without a sound. It starts when `watched` observes it. If it cannot be played, `fallback` makes
// what stands in its place.
function player(source, poster, alt, controls, fallback) {
  const video = el("video", { loop: true, muted: true, playsinline: true, controls, preload: "metadata", poster,
    "aria-label": `Video. ${alt}`, src: source });
  video.muted = true; // the attribute alone does not silence an element that a script has made
  video.wanted = !calm.matches;
  video.addEventListener("play", () => { video.wanted = true; });
  video.addEventListener("pause", () => {
    if (!video.leaving) video.wanted = false;
    video.leaving = false;
  });
  video.addEventListener("error", () => video.replaceWith(fallback()));
  return video;
}

// Keeps a video at the time of another one that is equally long.
function inStep(leader, other) {
  if (leader.tagName !== "VIDEO" || other.tagName !== "VIDEO") return;
  leader.addEventListener("timeupdate", () => {
    if (leader.duration !== other.duration) return;
    if (Math.abs(leader.currentTime - other.currentTime) > 0.12) other.currentTime = leader.currentTime;
  });
}
