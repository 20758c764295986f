// See angles.h. The libraries of two machines may differ in the last bit of a sine; sums and
// products do not. Of the angle whole quarters of a circle are taken off in three steps, the first
// two exact (Cody and Waite, "Software Manual for the Elementary Functions", 1980), and the rest,
// of at most an eighth of a circle, goes into the Taylor series.
#include "angles.h"

static double sine_of(double x)
{
    double s = x * x;
    return x + x * s * (-1.0 / 6 + s * (1.0 / 120 + s * (-1.0 / 5040 + s * (1.0 / 362880 + s * (-1.0 / 39916800 +
           s * (1.0 / 6227020800.0))))));
}

static double cosine_of(double x)
{
    double s = x * x;
    return 1 + s * (-0.5 + s * (1.0 / 24 + s * (-1.0 / 720 + s * (1.0 / 40320 + s * (-1.0 / 3628800 +
           s * (1.0 / 479001600.0 + s * (-1.0 / 87178291200.0)))))));
}

void angles(int position, const float *frequencies, int pairs, float scale, float *cosines, float *sines)
{
    for (int i = 0; i < pairs; i++) {
        double angle = (float)position * frequencies[i];
        long long quarters = (long long)(angle * 0x1.45f306dc9c883p-1 + 0.5);
        double count = (double)quarters; // the first two parts of pi / 2 have 22 and 21 bits
        double rest = angle - count * 0x1.921fb0p+0 - count * 0x1.5110b0p-22 - count * 0x1.18469898cc517p-44;
        double sine = sine_of(rest), cosine = cosine_of(rest);
        double turned_sine = quarters & 1 ? cosine : sine, turned_cosine = quarters & 1 ? sine : cosine;
        sines[i] = (float)(quarters & 2 ? -turned_sine : turned_sine) * scale;
        cosines[i] = (float)((quarters + 1) & 2 ? -turned_cosine : turned_cosine) * scale;
    }
}
